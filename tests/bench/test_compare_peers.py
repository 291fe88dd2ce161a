"""The comparison with peers: its client and its figures, on stand-ins; and the weights of a GGUF file."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.results_peers import peer_tables
from tests.bench.scripts import FOLDER, modules_of
from tests.waiting import wait_until

STAND_IN = Path(__file__).with_name("stand_in_peer.py")
TARGETS_MS = {"tight": 200.0, "relaxed": 1000.0}


scripts = modules_of("peers.compare", "peers.to_gguf", "peers.common")


def stand_in(compare, name: str):
    command = (sys.executable, str(STAND_IN), str(FOLDER / "peers"))
    return compare.Server(name, command, "/health", "1", True, {}, {"PYTHONPATH": str(FOLDER.parent)})


def test_servers_take_turns_and_are_asked_for_whole_texts(scripts, tmp_path):
    """Of two servers one is stopped while the other is measured. A stand-in sends two tokens every 4 ms."""
    compare = scripts["compare"]
    asked = [compare.Asked([97, 98], 7, index, ("tight", "relaxed")[index % 2]) for index in range(9)]
    with compare.up([stand_in(compare, "one"), stand_in(compare, "two")], tmp_path / "logs") as running:
        stopped = [Path(f"/proc/{each.group}/stat") for each in running]
        wait_until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stopped))
        for one in running:
            drive = compare.Drive(one.server, one.port, 0.0, TARGETS_MS)
            row = compare.driven(one, "closed 2", 0, TARGETS_MS, drive.closed, asked, 2)
            assert (row.server, row.failed, row.attained) == (one.server.name, 0, 1.0)
            assert row.requests in (6, 7) and row.goodput > 0 and row.ttft_p50 > 0 and row.tpot_p50 > 0
            due = [replace(each, due_s=0.01 * index) for index, each in enumerate(asked)]
            row = compare.driven(one, "open 1", 0, TARGETS_MS, drive.open, due, 10.0)
            assert (row.requests, row.failed) == (9, 0)
        groups = [each.group for each in running]
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


def test_requests_that_take_too_long_or_have_no_server_failed(scripts, tmp_path):
    """What came of a request before it was cut off counts."""
    compare, common = scripts["compare"], scripts["common"]
    asked = [compare.Asked([97], 2, 1, "tight"), compare.Asked([97], 4_000, 0, "tight")]
    with compare.up([stand_in(compare, "one")], tmp_path / "logs") as (one,):
        drive = compare.Drive(one.server, one.port, 0.0, TARGETS_MS)
        with one.awake():
            heard, start, end = asyncio.run(drive.open(asked, 3.0))
            limited = asyncio.run(compare.ask(one.server, one.port, asked[1], 0.0, {}, 0.1))
        assert [each.error for each in (*heard, limited)] == [None, "cut off", "cut off"]
        row = compare.figures("one", "open 1", 0, heard, start, end, TARGETS_MS)
        assert (row.requests, row.failed) == (2, 1)
        assert row.tokens_per_s * (end - start) == pytest.approx(2 + len(heard[1].at_s)) and heard[1].at_s
    gone = compare.Drive(stand_in(compare, "none"), common.free_port(), 0.0, TARGETS_MS)
    heard, _, _ = asyncio.run(gone.open(asked[:1], 5.0))
    assert heard[0].error is not None and "ConnectionRefusedError" in heard[0].error


def test_figures_count_what_came_while_the_load_was_measured(scripts):
    """From 1 s to 3 s. Of three requests that ended then, one met its target, one did not, and one failed; a fourth
    ended before, and two tokens of a fifth came."""
    compare = scripts["compare"]

    def heard(slo_class: str, at_s: list[float], sent_s: float = 0.5, error: str | None = None):
        return compare.Heard(compare.Asked([1], len(at_s), 0, slo_class), sent_s, at_s, error)

    some = [
        heard("relaxed", [1.5, 2.0, 2.4]),
        heard("tight", [1.5, 2.0]),
        heard("tight", [], error="cut off"),
        heard("relaxed", [0.7, 0.8]),
        heard("relaxed", [2.5, 2.9, 3.5]),
    ]
    row = compare.figures("s", "closed 4", 2, some, 1.0, 3.0, TARGETS_MS)
    assert (row.requests, row.failed, row.tokens_per_s, row.goodput) == (3, 1, 3.5, 1.5)
    assert (row.attained, row.joint) == (1 / 3, 1 / 3)
    assert row.tpot_p50 == pytest.approx(475) and row.ttft_p50 == pytest.approx(1000)
    late = [replace(some[0], sent_s=-2.0)]
    row = compare.figures("s", "open 1", 0, late, 1.0, 3.0, TARGETS_MS)
    assert (row.joint, row.goodput) == (0.0, 0.0) and row.attained > 0


def test_results_are_saved_after_each_round(scripts, tmp_path, monkeypatch):
    """No request arrives within so short an open loop, which is left out."""
    compare = scripts["compare"]
    for name, value in (("CLOSED", (1,)), ("OPEN", (0.5,)), ("NEW_TOKENS", (4, 6))):
        monkeypatch.setattr(compare, name, value)
    servers = [stand_in(compare, f"{compare.OURS}, a"), replace(stand_in(compare, "peer, plain"), draft=False)]
    monkeypatch.setattr(compare, "servers_of", lambda _: servers)
    options = argparse.Namespace(
        out=tmp_path / "peers.json", target="demo", name="", rounds=2, seed=0, temperature=0.0, duration=1e-9, drain=0.0
    )
    saved = []
    compare.compare(options, saved.append)
    assert [(each["rounds"], len(each["rows"])) for each in saved] == [(1, 2), (2, 4)]
    assert {row["load"] for row in saved[-1]["rows"]} == {"closed 1"} and saved[0]["capacity_rps"] > 0


def test_an_aim_against_a_peer_that_had_no_goodput_in_some_rounds_is_of_medians(scripts) -> None:
    def loads(server: str, number: int, goodput: float) -> list[dict]:
        measured = scripts["compare"].Measured
        return [asdict(measured(server, f"closed {n}", number, 8, 1, 9.0, goodput, *[0.5] * 6)) for n in (1, 16)]

    def tables(*peer: float) -> str:
        ours = (loads("adaserve_jax, adaserve", number, 12.0) for number in range(3))
        theirs = (loads("vLLM, plain", number, each) for number, each in enumerate(peer))
        rows = sorted(chain(*ours, *theirs), key=lambda each: int(each["load"].split()[1]))
        servers = [{"name": name, "version": "1"} for name in ("adaserve_jax, adaserve", "vLLM, plain")]
        names = [each["name"] for each in servers]
        return peer_tables({
            "rows": rows, "servers": servers, "alone_ms": dict.fromkeys(names, 1.0), "target": "demo",
            "same_greedy_text": dict.fromkeys(names, True), "targets_ms": TARGETS_MS, "temperature": 0.0,
            "new_tokens": [4, 6], "ttft_ms": 2000.0, "capacity_rps": 1.0, "duration_s": 1.0, "drain_s": 1.0,
            "rounds": 3, "machine": "a machine", "commit": "c" * 40, "command": "python",
        })  # fmt: skip

    def aim(*peer: float) -> str:
        return next(each for each in tables(*peer).splitlines() if "| goodput | vLLM" in each)

    assert "| 1.20 of the medians; the peer has none in 1 of 3 rounds | met |" in aim(0.0, 10.0, 11.0)
    assert "| 1.09 of the medians; the peer has none in 1 of 3 rounds | **missed** |" in aim(0.0, 11.0, 12.0)
    assert "| the peer has none in 2 of 3 rounds | met |" in aim(0.0, 0.0, 12.0)
    assert "| 3 of 24 |" in tables(10.0, 10.0, 10.0)


def test_a_server_whose_tokens_come_all_at_once_sets_no_targets(scripts, monkeypatch, capsys):
    compare = scripts["compare"]

    async def at_once(server, port, asked, *_):
        return compare.Heard(asked, 0.0, [1.0] * asked.new_tokens)

    monkeypatch.setattr(compare, "ask", at_once)
    one = SimpleNamespace(server=SimpleNamespace(name="one"), port=0, awake=nullcontext)
    with pytest.raises(SystemExit):
        compare.alone(one, compare.Requests("demo"))
    assert "one sends the tokens of a text all at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peer", "missing", "how"),
    [
        ("llama.cpp", "no-llama", "brew install llama.cpp"),
        ("vLLM", "no-vllm", "pip install vllm"),
        ("transformers", "torch", 'pip install "transformers[serving]" torch accelerate'),
    ],
)
def test_a_peer_that_is_not_installed_is_named_with_the_command(
    scripts, tmp_path, monkeypatch, capsys, peer, missing, how
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    given = ["--llama-server", "no-llama", "--vllm", "no-vllm", "--out", str(tmp_path / "peers.json")]
    with pytest.raises(SystemExit, match="2"):
        scripts["compare"].main([*given, "--peers", peer])
    said = capsys.readouterr().err
    assert f"{missing} is not installed" in said and f"install it with: {how}" in said


def test_a_comparison_needs_a_server_without_a_draft(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(scripts["compare"], "_transformers", lambda: "5")
    with pytest.raises(SystemExit, match="2"):
        scripts["compare"].main(["--peers", "transformers", "--out", str(tmp_path / "peers.json")])
    assert "whose speed without a draft sets the targets" in capsys.readouterr().err


def test_every_server_is_asked_the_same(scripts):
    requests = scripts["compare"].Requests("demo")
    assert requests.cut(4, (0, 1)) == requests.cut(4, (0, 1)) != requests.cut(4, (0, 2))
    arriving = requests.arriving(20.0, 2.0, (0, 5, 1))
    times = [each.due_s for each in arriving]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 2.0 and 20 < len(times) < 70
    assert {each.slo_class for each in arriving} == {"tight", "relaxed"}
    assert requests.arriving(0.0, 2.0, (0, 5, 1)) == [], "no peer emitted a token"


def test_rotary_rows_are_reordered_so_that_pairs_are_neighbours(scripts):
    """Hugging Face turns rows i and i + D/2 of a head together, GGUF's Llama rows 2 i and 2 i + 1."""
    weight = np.arange(2 * 4 * 3).reshape(8, 3)
    found = scripts["to_gguf"].interleaved(weight, 2)
    assert (found[:, 0] // 3).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_weights_have_the_names_of_gguf(scripts):
    name = scripts["to_gguf"].gguf_name
    assert name("model.layers.11.self_attn.q_proj.weight") == "blk.11.attn_q.weight"
    assert name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert [name(each) for each in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")] == [
        "token_embd.weight", "output_norm.weight", "output.weight"
    ]  # fmt: skip
