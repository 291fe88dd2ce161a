"""`adaserve draft` as a process: ready, used, ended by a signal; and what it says when it cannot start."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from adaserve_jax.cli.app import app
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import weights_hash
from adaserve_jax.star.messages import Draft, Hello, Open, Refused, SessionSampling, Tree, cells_hash
from adaserve_jax.tree.acceptance_table import read_chances
from tests.conftest import ROOT
from tests.star.streams import HANG_S, Target, until

SMALL = (
    "--max-sessions", "4", "--max-batch", "4", "--max-batch-tokens", "16", "--max-context", "128", "--max-width", "2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_it_drafts_until_a_signal_and_says_so_to_its_targets(kind: signal.Signals):
    command = [
        sys.executable, "-m", "adaserve_jax.cli", "draft", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *SMALL,
    ]  # fmt: skip
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as held,
    ):
        held.callback(process.kill)
        assert process.stdout is not None
        ready = process.stdout.readline()
        folder = resolve_folder("demo", "draft")
        found = re.fullmatch(
            r"ready: grpc://127.0.0.1:(\d+) drafts with demo, draft version (\w+), metrics on (\S+)/metrics\n", ready
        )
        assert found is not None and found[2] == weights_hash(folder), ready
        assert httpx.get(f"{found[3]}/health").json()["status"] == "ok"
        tokenizer, table = Tokenizer.from_folder(folder), read_chances(Path(folder).parent / "calibration.json")
        text = np.array(tokenizer.encode("def add(a, b):\n    return a +"), np.int32)
        hello = Hello("t", tokenizer.vocabulary_hash(2048), cells_hash(table))
        target = Target(int(found[1]))
        target.send(hello)
        target.receive()
        target.send(Open(1, 1, text, SessionSampling(0, 0, 0.0, 0, 1.0, 0.0)),
                    Draft(1, 1, 1, len(text), text[:0], 4, 2, True, 1.0, HANG_S))  # fmt: skip
        tree = target.receive()
        assert isinstance(tree, Tree) and len(tree.index) == 8
        until(
            lambda: "adaserve_draft_service_rounds_total 1.0" in httpx.get(f"{found[3]}/metrics").text
        )  # a moment old
        process.send_signal(kind)
        assert [each.code for each in target.rest() if isinstance(each, Refused)] == ["shutting_down"]
        target.close()
        assert process.wait(HANG_S) == 0


@pytest.mark.parametrize(
    ("listen", "options", "message"),
    [
        ("0.0.0.0:7070", [], "listen must be on loopback without a token"),
        ("127.0.0.1:0", ["--token-file", "absent"], "token_file must be a file that can be read, got absent"),
    ],
)
def test_a_service_that_could_not_be_guarded_is_refused_before_anything_is_loaded(
    listen: str, options: list[str], message: str
):
    with pytest.raises(ConfigError, match=message):
        app(["draft", "--listen", listen, "--http", "", "--model", "absent", *options], standalone_mode=False)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in ("main", "metrics", "server"):
        monkeypatch.delitem(sys.modules, f"adaserve_jax.star.service.{name}", raising=False)
    expected = (
        r"a draft service needs the package 'grpc', which is not installed; run: pip install 'adaserve-jax\[star\]'"
    )
    with pytest.raises(ConfigError, match=expected):
        app(["draft"], standalone_mode=False)
