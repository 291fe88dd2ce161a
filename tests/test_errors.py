"""One tree of errors, and no message that nobody has read: of every text that is raised, words of its own stand in some
test's strings."""

from __future__ import annotations

import ast
import builtins
import re
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adaserve_jax import errors
from adaserve_jax.cli.cluster import _detach, route
from adaserve_jax.cli.grow import _shape
from adaserve_jax.cluster.router_client import NoAnswer, request_json
from adaserve_jax.cluster.run_folder import ClusterFolder, give_order
from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.sandbox import BoundedWork
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.engine.supervisor import SupervisedEngine
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.types import StepPlan
from adaserve_jax.workloads.workload import parse_slos
from tests.conftest import ROOT

PACKAGE, TESTS = ROOT / "adaserve_jax", ROOT / "tests"
TREE = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
OWN = {"MemberFailed", "NoAnswer", "WireError"}
"""Branches that one package raises and catches itself, or shows as one of the tree."""
OUTSIDE = {"ApiError", "RateLimited", "TargetLost", "_StoppedError", "EventTooLarge"}
"""Answers of the server, which FastAPI raises by their status, and signals that no caller sees."""
WORDS = 4


def classes() -> dict[str, str]:
    """Every exception class of the package, and its file."""
    bases = {
        name: (base, path.relative_to(PACKAGE).as_posix())
        for path in PACKAGE.rglob("*.py")
        for name, base in re.findall(r"^class (\w+)\((\w+)\):", path.read_text(), re.MULTILINE)
    }

    def raised(name: str) -> bool:
        kind = getattr(builtins, name, None)
        own = isinstance(kind, type) and issubclass(kind, BaseException)
        return own or name == "HTTPException" or (name in bases and raised(bases[name][0]))

    return {name: file for name, (_, file) in bases.items() if raised(name)}


def test_errors_are_one_tree_in_one_file():
    elsewhere = {name for name, file in classes().items() if file != "errors.py"}
    assert elsewhere == OWN | OUTSIDE, "an error that callers see belongs in errors.py"
    assert all(issubclass(kind, errors.AdaServeError) for kind in TREE.values())
    assert all((kind.__doc__ or "").strip() for kind in TREE.values())


def test_codes_are_stable_names():
    codes = {name: kind.code for name, kind in TREE.items() if "code" in vars(kind)}
    assert codes == {
        "AdaServeError": "engine_error", "QueueFullError": "queue_full", "OverloadedError": "overloaded",
        "EngineDeadError": "engine_dead", "EngineRestartingError": "engine_restarting",
    }  # fmt: skip
    assert errors.RequestError("x").code == "invalid_request"
    assert errors.OverloadedError("x", retry_after_s=2.0).retry_after_s == 2.0


def pieces(node: ast.expr) -> Iterator[str]:
    """What is constant in a message."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield from (part.value for part in node.values if isinstance(part, ast.Constant))
    elif isinstance(node, ast.BinOp):
        yield from pieces(node.left)
        yield from pieces(node.right)


Run = tuple[str, ...]


def runs_of(texts: Iterable[str]) -> set[Run]:
    """Every `WORDS` words in a row of the texts, without what stands between them: quotes, escapes of patterns. Where
    all texts have fewer, the longest."""
    words = [tuple(re.findall(r"\w+", text)) for text in texts]
    found = {run for each in words for run in zip(*(each[at:] for at in range(WORDS)), strict=False)}
    return found or {max(words, key=len, default=())} - {()}


def strings(tree: ast.AST) -> Iterator[str]:
    """Texts of a program that it may compare with; what it says of itself in docstrings is none."""
    said: set[int] = set()
    for node in ast.walk(tree):  # what holds a node comes before it
        if isinstance(node, ast.Expr):
            said.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def asserted() -> list[Run]:
    """The words of every string of the tests."""
    return [
        tuple(re.findall(r"\w+", text)) for path in TESTS.rglob("*.py") for text in strings(ast.parse(path.read_text()))
    ]


def messages() -> list[tuple[str, str, list[str]]]:
    """Where an error of the package is raised, which, and what is constant in its text."""
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", getattr(node.exc.func, "id", ""), list(pieces(node.exc.args[0])))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "raise " in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    ]


def unread() -> list[str]:
    """Where messages are raised that no test has a text of its own of."""
    kinds = set(TREE) - {"IntegrityError"} | OWN
    held = [(where, tuple(texts), runs_of(texts)) for where, kind, texts in messages() if kind in kinds]
    said = Counter(run for runs in {texts: runs for _, texts, runs in held}.values() for run in runs)
    sizes, firsts = {len(run) for run in said}, {run[0] for run in said}
    read = {
        run
        for each in set(asserted())
        for at, word in enumerate(each)
        if word in firsts
        for size in sizes
        if (run := each[at : at + size]) in said
    }
    return [
        f"{where}: {' ... '.join(texts)}"
        for where, texts, runs in held
        if runs and not ({run for run in runs if said[run] == 1} or runs) & read
    ]


def test_every_message_is_asserted_somewhere():
    """Four words of it in a row, that no other message has where it has such, stand in a string of a test; whether that
    is compared with what is raised, the test there says. Not looked at: messages that are made of values or of another
    error's text, and those of `IntegrityError`, which no caller causes."""
    assert unread() == [], "assert these texts in a test"


@pytest.mark.parametrize(("engine", "text"), [
    (LocalEngine, "an engine starts once; build a new LocalEngine instead"),
    (ProcessEngine, "an engine starts once; build a new ProcessEngine instead"),
    (SupervisedEngine, "an engine starts once; build a new SupervisedEngine instead"),
])  # fmt: skip
def test_an_engine_starts_once(engine: Any, text: str):
    one = engine(EngineConfig())
    one.close()
    with pytest.raises(errors.EngineDeadError, match=text):
        one.start()


def test_too_many_schemas_at_once_are_told_to_come_again():
    work, begun, free = BoundedWork(stack_bytes=1 << 20, limit_s=0.01, at_once=1), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        free.wait()

    with pytest.raises(TimeoutError):
        work.run(hold)
    assert begun.is_set()
    with pytest.raises(errors.QueueFullError, match="too many schemas are being prepared; retry later"):
        work.run(lambda: None)
    free.set()


def test_a_tokenizer_that_no_grammar_can_read_is_named():
    slow: Any = SimpleNamespace(_tokenizer=object(), _backend=None, name="slow")
    expected = r"slow: structured output needs a tokenizer of the `tokenizers` library \(tokenizer.json\), got object"
    with pytest.raises(errors.UnsupportedModelError, match=expected):
        Tokenizer.backend_json(slow)


def test_a_cluster_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(errors.ConfigError, match=r"no cluster runs in .*; start one with 'adaserve cluster up'"):
        list(give_order(tmp_path / "socket", "stop"))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    with pytest.raises(errors.ConfigError, match=r"no orders \(Connection refused\): it is stopping, or was killed"):
        list(give_order(tmp_path / "left", "stop"))
    starting = ClusterFolder(tmp_path / "run")
    starting.open()
    with pytest.raises(errors.ConfigError, match="takes no orders yet: it is starting or ending; ask again"):
        list(give_order(starting.socket, "down"))
    starting.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigError, match=r"run_folder .*file/x cannot be used: Not a directory"):
        ClusterFolder(tmp_path / "file" / "x").make()
    with pytest.raises(NoAnswer, match=r"http://127.0.0.1:1/health does not answer: "):
        request_json("http://127.0.0.1:1/health")


def test_a_cluster_that_is_killed_carries_no_order_out(tmp_path: Path):
    def answer_half() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as asked:
            asked.readline()
            connection.sendall(b'{"line": "target-0 is replaced"}\n')

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        cluster = threading.Thread(target=answer_half)
        cluster.start()
        lines = give_order(tmp_path / "s", "restart targets")
        assert next(lines) == "target-0 is replaced"
        with pytest.raises(errors.AdaServeError, match="the cluster ended before the order was carried out"):
            next(lines)
        cluster.join()


@pytest.mark.slow
def test_a_cluster_in_the_background_that_ends_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["adaserve", "cluster", "up", "--detach", "--targets", "0"])
    with pytest.raises(errors.AdaServeError, match=r"^targets must be .*got 0 \(the cluster ended with status 2; its"):
        _detach(ClusterFolder(tmp_path / "run"))


def test_a_target_alone_drafts_nothing():
    alone, plan = cast(ModelExecutor, SimpleNamespace(drafter=None)), cast(StepPlan, None)
    with pytest.raises(errors.ConfigError, match="this engine has no drafter; plan steps with draft=None"):
        ModelExecutor.speculate(alone, plan)


def test_targets_of_a_class_are_said_once():
    with pytest.raises(errors.ConfigError, match="class 'a' is named twice; say all its targets once, apart by commas"):
        parse_slos("a:tpot=5;a:ttft=100")
    with pytest.raises(errors.ConfigError, match="slos: class a: slo_tpot_ms must be a finite number above 0"):
        parse_slos("a:tpot=-5")


def test_the_folder_of_a_cluster_is_its_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.getuid", lambda: -1)
    with pytest.raises(errors.ConfigError, match=r"run_folder must be your own, got .*, which is another user's"):
        ClusterFolder(tmp_path / "run").make()


def test_a_router_alone_has_targets_or_will_be_given_them():
    with pytest.raises(errors.ConfigError, match="--targets must name a server at least, or --token-file the token"):
        route()


def test_a_size_that_a_grown_model_needs_is_named():
    with pytest.raises(errors.ConfigError, match="give --params, or all of the sizes; --layers is missing"):
        _shape("", {})


def test_pages_that_are_not_there_are_counted():
    pool = PagePool(2, 8)
    expected = "asked for 3 KV pages, 2 of 2 are free; preempt or finish a request, or raise num_pages"
    with pytest.raises(errors.OutOfPagesError, match=expected):
        pool.alloc(3)
