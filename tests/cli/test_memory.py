"""`adaserve profile --memory`: tables in both layouts, JSON, and a refusal after what it shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.memory.ledger import Workspace
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.runtime import loading as planned
from adaserve_jax.runtime.sizing import Resolved, resolve
from tests.models.checkpoints import metaspace_tokenizer, write_checkpoint
from tests.program import run_program
from tests.runtime.test_sizing import DRAFT, TARGET


@pytest.fixture
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that take 3 MiB, and an extension of 20 pages where there is a draft."""

    def plan_memory(config: EngineConfig, progress: Any, *, elastic: bool) -> tuple[Resolved, Workspace]:
        assert elastic, "the default policy has the draft give its memory to pages"
        resolved = resolve(config, TARGET, None if config.draft is None else DRAFT)
        extension = 0 if config.draft is None else 20
        return replace(resolved, limits=replace(resolved.limits, extension_pages=extension)), Workspace(3 << 20)

    monkeypatch.setattr(planned, "plan_memory", plan_memory)


@pytest.mark.usefixtures("without_compiling")
def test_the_ledger_is_shown_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A page of the target takes 5 x 2 x 2 x 64 x 64 x 4 bytes, 0.3 MiB; the draft's weights 2.4 MiB."""
    path = tmp_path / "ledger.json"
    assert run_program("profile", "--memory", "--exact", "--num-pages", "64", "--out", str(path)) == 0
    resident, away = capsys.readouterr().out.split("draft away, pages in its place")
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in away.splitlines() if "│" in line]
    assert ["target KV pages", "20.0", ""] in [row[:3] for row in rows]
    assert ["extension pages", "6.2", ""] in [row[:3] for row in rows]
    assert ["draft weights (away)", "", "2.4"] in [row[:3] for row in rows]
    assert ["workspace", "3.0", ""] in [row[:3] for row in rows]
    assert "draft resident" in resident and "draft KV pages" in resident and "extension" not in resident
    assert "copies on the host count too" in away

    written = json.loads(path.read_text())
    assert (written["kind"], written["fits"], written["target_page_bytes"]) == ("adaserve ledger", True, 327680)
    parts = {part["name"]: part for part in written["layouts"]["draft away, pages in its place"]}
    assert parts["extension pages"] == {"name": "extension pages", "device_bytes": 20 * 327680, "host_bytes": 0}


@pytest.mark.usefixtures("without_compiling")
def test_what_does_not_fit_is_shown_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--draft", "none", "--num-pages", "64", "--memory-limit-mib", "32", "--draft-sources"]
    assert run_program("profile", "--memory", "--exact", *options, "suffix") == 2
    out, err = capsys.readouterr()
    assert "texts to draft from" in out and "draft_sources none" not in err
    assert run_program("profile", "--memory", "--exact", *options, "none") == 2
    out, err = capsys.readouterr()
    assert "without a draft" in out and "122.1%" in out  # 16.1 + 20 + 3 of 32
    assert err.count("\n") == 1 and "the engine takes 39.1 MiB of memory, but the limit is 32.0 MiB" in err
    assert "num_pages at most 41; memory_limit_mib at least 40" in err


def test_without_exact_nothing_is_compiled_and_the_workspace_is_what_is_held_free_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, cache = tmp_path / "ledger.json", tmp_path / "cache"
    options = ["--num-pages", "64", "--compile-cache", str(cache), "--out", str(path)]
    assert run_program("profile", "--memory", *options) == 0
    assert "workspace is estimated from shapes; --exact compiles" in capsys.readouterr().err
    assert not cache.exists(), "a program was compiled"
    written = json.loads(path.read_text())
    assert written["fits"] and written["workspace_bytes_by_tokens"] is None
    parts = {part["name"]: part["device_bytes"] for part in written["layouts"]["draft resident"]}
    assert parts["target KV pages"] == 64 * written["target_page_bytes"]
    assert parts["workspace"] == written["reserve_bytes"] > 0
    assert run_program("profile", "--memory", "--memory-limit-mib", "1", *options) == 2
    assert "memory, but the limit is 1.0 MiB" in capsys.readouterr().err


def test_room_for_adapters_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For each product of the demo target, three adapters of rank 8: an A for each of its projections, and a B that
    reads all of them."""
    ledgers = []
    for index, lora in enumerate(([], ["--max-loras", "3", "--max-lora-rank", "8"])):
        path = tmp_path / f"{index}.json"
        assert run_program("profile", "--memory", "--num-pages", "64", *lora, "--out", str(path)) == 0
        shown = capsys.readouterr().out
        assert ("target adapters" in shown) is bool(lora)
        parts = json.loads(path.read_text())["layouts"]["draft resident"]
        ledgers.append({part["name"]: part["device_bytes"] for part in parts})
    without, with_room = ledgers
    config = ModelConfig.from_folder(resolve_folder("demo", "target"))
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = ((3, hidden, queries + 2 * keys), (1, queries, hidden), (2, hidden, 2 * inner), (1, inner, hidden))
    numbers = config.num_layers * sum(8 * parts * (inputs + outputs) for parts, inputs, outputs in products)
    assert with_room["target adapters"] == 3 * 4 * numbers
    assert {name: size for name, size in with_room.items() if name != "target adapters"} == without


MEMORY_ALONE = "--memory measures nothing; leave out --search, --acceptance, --name, --plot and --check-seconds"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out must name the JSON file to write; only --memory does without"),
        (["--exact", "--out", "x.json"], "--exact is about --memory; give both, or leave it out"),
        (["--memory", "--search"], MEMORY_ALONE),
        (["--memory", "--name", "x"], MEMORY_ALONE),
        (["--memory", "--check-seconds", "5"], MEMORY_ALONE),
        (
            ["--device", "h100", "--check-seconds", "5"],
            "--device measures nothing; leave out --memory, --exact, --search, --trace, --plot and --check-seconds",
        ),
        (["--out", "x.json", "--trace", "t"], "--trace is what --search simulates; give both, or leave it out"),
        (["--out", "x.json", "--layers", "3"], "--programs and --layers are about --device; give it too, or leave"),
        (["--device", "h100", "--acceptance", "1.5"], "--acceptance must be from 0 to below 1"),
        (
            ["--memory", "--num-processes", "2", "--coordinator", "host:1"],
            "memory is planned for one process, got num_processes 2; leave it out",
        ),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run_program("profile", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "absent" / "x.json"
    assert run_program("profile", "--memory", "--out", str(out)) == 2
    assert (
        f"cannot write {out}: expected a file in a folder that is there; choose another --out"
        in capsys.readouterr().err
    )


def test_a_draft_of_another_vocabulary_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
    draft = write_checkpoint(tmp_path / "draft", tokenizer=metaspace_tokenizer())
    models = ["--target", str(target), "--draft", str(draft), "--max-context", "64"]
    assert run_program("profile", "--memory", *models) == 0
    shown = capsys.readouterr().out
    assert "draft of another vocabulary: intersection of vocabularies (tokens of equal bytes): covers 97.8% of" in shown
    assert "draft vocabulary maps" in shown
