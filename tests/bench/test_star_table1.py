"""Paced targets walk trees as a target would, and what is made of their runs is what was counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.profile import chance_of_chains
from adaserve_jax.star.client.sessions import SessionTable
from adaserve_jax.types import CandidateTrees, StepPlan
from benchmarks.starsd.closed_forms import accepted_tokens as mean_accepted
from scripts.results_star import table1_tables
from tests.bench.scripts import modules_of

VOCABULARY = 3


scripts = modules_of("starsd.targets", "starsd.service", "starsd.table1", "starsd.figures")


def random_trees(rng: np.random.Generator, rows: int, depth: int, width: int) -> CandidateTrees:
    """Trees of few tokens, siblings of different ones, with nodes that are absent."""
    columns = depth * width
    token = rng.integers(0, VOCABULARY, (rows, columns)).astype(np.int32)
    parent = np.full((rows, columns), -1, np.int32)
    log_f = np.where(rng.random((rows, columns)) < 0.8, 0.0, -np.inf).astype(np.float32)
    for row in range(rows):
        taken = set()
        for at in range(columns):
            level = at // width
            if level:
                parent[row, at] = rng.integers((level - 1) * width, level * width)
            if (parent[row, at], token[row, at]) in taken or (level and np.isinf(log_f[row, parent[row, at]])):
                log_f[row, at] = -np.inf
            elif log_f[row, at] == 0:
                taken.add((parent[row, at], token[row, at]))
    level = np.repeat(np.arange(1, depth + 1, dtype=np.int32), width)
    return CandidateTrees(token, parent, log_f, level)


def paths(trees: CandidateTrees, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root down to each node that is there."""
    found = {-1: ()}
    for at in range(trees.token.shape[1]):
        if trees.log_f[row, at] > -np.inf:
            found[at] = (*found[int(trees.parent[row, at])], int(trees.token[row, at]))
    return set(found.values())


def test_a_tree_is_accepted_as_far_as_it_has_the_text(scripts) -> None:
    rng, counts = np.random.default_rng(0), []
    for _ in range(150):
        trees = random_trees(rng, 2, 4, 3)
        for row in range(2):
            text = rng.integers(0, VOCABULARY, 4)
            known = paths(trees, row)
            longest = max(n for n in range(5) if tuple(text[:n].tolist()) in known)
            counts.append(scripts["targets"].accepted(trees, row, text))
            assert counts[-1] == longest
    assert set(counts) == {0, 1, 2, 3, 4}
    assert scripts["targets"].accepted(CandidateTrees.empty(1), 0, np.arange(3)) == 0


class Guesser:
    """A drafter that knows the texts and is wrong from a drawn level on; it checks what it is told by a real mirror."""

    wait_s = 0.0

    def __init__(self, texts, rows: int) -> None:
        self._texts = {text.seed: np.array(text.prompt + text.output) for text in texts}
        self._table, self._rng = SessionTable(rows), np.random.default_rng(1)
        self.right = 0

    def propose(self, plan: StepPlan) -> CandidateTrees:
        assert plan.draft is not None
        sessions, _ = self._table.update(plan)
        depth = plan.draft.depth
        if not depth:
            return CandidateTrees.empty(plan.num_decode)
        shape = (plan.num_decode, depth)
        token, parent = np.zeros(shape, np.int32), np.tile(np.arange(-1, depth - 1, dtype=np.int32), (shape[0], 1))
        for row, session in enumerate(sessions):
            assert session is not None
            text = self._texts[session.sampling.seed]
            assert session.tokens().tolist() == text[: session.length].tolist()
            assert plan.root_token[row] == text[session.length - 1] and plan.ctx_len[row] == session.length - 1
            right = int(self._rng.integers(0, depth + 1))
            token[row] = text[session.length : session.length + depth]
            token[row, right:] += 1
            self.right += right
        return CandidateTrees(token, parent, np.zeros(shape, np.float32), np.arange(1, depth + 1, dtype=np.int32))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_paced_target_follows_its_texts(scripts, rows: int) -> None:
    targets, rng = scripts["targets"], np.random.default_rng(2)
    texts = [
        targets.Text(tuple(rng.integers(0, 99, 5).tolist()), tuple(rng.integers(0, 99, 30).tolist()), seed, 0.7)
        for seed in range(4)
    ]
    assert targets.texts_from_json(json.loads(json.dumps(targets.texts_as_json(texts)))) == texts
    drafter = Guesser(texts, rows)
    target = targets.PacedTarget(drafter, texts, targets.Shape(4, 1, 0.0), rows=rows, first=3, most_fed=2)
    for _ in range(60):
        target.step()
    tally = target.tally
    assert tally.rounds == 60 * rows and tally.accepted == drafter.right and tally.drafted == 60
    begun = tally.steps - 60
    assert begun > 2 * rows and tally.tokens == tally.rounds + tally.accepted + begun


def test_the_chance_of_what_was_accepted() -> None:
    for chance in (0.0, 0.3, 0.77, 1.0):
        assert chance_of_chains(mean_accepted(chance, 4), 4) == pytest.approx(chance, abs=1e-9)


def made_runs(scripts, service_s: float, back_s: float) -> list:
    """Runs of a draft as the closed form has it: half of the text right, 10 s each."""
    service, table1, targets = scripts["service"], scripts["table1"], scripts["targets"]
    found = []
    for number in range(3):
        for batched in (False, True):
            for n in (1, 2, 3, 4, 5, 6):
                rounds = (
                    10.0 / max(n * service_s, back_s + service_s) * n * (1 + batched * (n == 6)) * (1 + number / 10)
                )
                busy, wait_s = rounds * service_s, 0.001 * n
                counts = service.Counts(10.0, 10.0 - busy, busy, busy, rounds, rounds, wait_s * rounds, rounds)
                tally = targets.Tally(
                    rounds=1000,
                    tokens=round(3 * rounds),
                    accepted=2000,
                    steps=100,
                    slept_s=3.0,
                    drafted=1000,
                    round_s=9.0,
                )
                found.append(table1.Run(n, batched, number, 10.0, counts, tally, 0.5))
    return found


@pytest.mark.slow
def test_what_is_reported_is_what_was_counted(scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table1 = scripts["table1"]
    monkeypatch.setattr(table1, "COMPUTED", (*range(1, 7), 64))
    monkeypatch.setattr(table1, "SIMULATED_DRAFTS", 24)
    monkeypatch.setattr(table1, "LEAST_ROUNDS", 4)
    runs, times = made_runs(scripts, 0.015, 0.031), {n: 0.015 * (1 + 0.1 * (n - 1)) for n in range(1, 9)}
    alone = [scripts["table1"].Alone(60.0, 20.0, 0.015)]
    result = table1.report(runs, alone, [times], table1.Shape(4, 1, 0.03))
    rows = {(row["kind"], row["batched"], row["n"]): row for row in result["rows"]}
    assert result["verify_s"] == pytest.approx(0.03) and result["tokens_per_round"] == pytest.approx(3.0)
    assert mean_accepted(result["acceptance"], 4) == pytest.approx(2.0)
    assert result["full"] == 3, "of the times that were measured, and what is left of a round of one target"
    assert rows["measured", False, 3]["load"] == pytest.approx(1.1 * 0.015 * 3 / 0.046), "the median of three rounds"
    assert rows["measured", False, 6]["rounds_per_s"] == pytest.approx(1.1 / 0.015)
    assert rows["measured", False, 2]["wait_s"] == pytest.approx(0.002)
    assert rows["measured", False, 1]["throughput_tps"] == pytest.approx(3 * 1.1 / 0.046, rel=0.01)
    assert result["batched_over_one_by_one"]["measured"] == pytest.approx(2.0, rel=0.01)
    assert rows["closed", False, 64]["load"] == 1.0 and ("simulated", True, 64) in rows
    about = {
        "commit": "0123456789abcdef", "machine": "a machine", "load_1m": 1.5, "target": "t", "draft": "d",
        "seconds": 10.0, "rounds": 3, "texts": 4, "new_tokens": 64, "temperature": 0.7, "command": "python x.py",
    }  # fmt: skip
    assert table1_tables(tmp_path) == []
    (tmp_path / "table1-a.json").write_text(json.dumps(about | result))
    shown = "\n\n".join(table1_tables(tmp_path))
    assert "`python x.py`" in shown and "0123456789ab" in shown and "N_full = 3" in shown
    assert "| tokens/s | one by one | measured |" in shown and "| load, % | paper |" in shown
    assert "99.6" in shown, "the paper's own load at N = 6"
    least, most = (3 * each / 0.046 for each in (1.0, 1.2))
    assert f"by N: one by one {least:.1f} to {most:.1f}, " in shown and "whole engines" not in shown
    real = {
        "target": "110M-f32", "texts": 9, "same_texts": 8, "verify_s": 0.0312, "spread": [],
        "rows": [row for row in result["rows"] if row["kind"] == "measured" and row["n"] <= 2],
        "colocated": {"draft": [{"throughput_tps": each} for each in (50.0, 61.0, 52.0)]},
    }  # fmt: skip
    (tmp_path / "table1-a.json").write_text(json.dumps(about | result | {"engines": real, "rounds": 1}))
    shown = "\n\n".join(table1_tables(tmp_path))
    assert "(110M-f32, 31.2 ms a verification" in shown and "8 of 9 texts" in shown
    assert "draft in its process 52.0 tokens/s" in shown
    assert shown.count("| N = 2 | ") == 3, "the head, and both ways of drafting"
    assert "over rounds" not in shown
    scripts["figures"].draw(result["rows"], tmp_path / "a.png", paper=result["paper"])
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_service_is_read_by_its_metrics(scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    service = scripts["service"]
    text = "".join(
        f"# TYPE x counter\nadaserve_draft_service_{name}_total {at + 0.5}\n" for at, name in enumerate(service.NAMES)
    )
    reply = type("Reply", (), {"text": text})
    monkeypatch.setattr(service.httpx, "get", lambda url, timeout: reply)
    counts = service.Service(1, 2, "http://x").counts()
    assert counts == service.Counts(0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5)
    assert (counts - replace(counts, rounds=1.5)).rounds == 4.0
    assert (
        service.READY.search(
            "ready: grpc://127.0.0.1:7070 drafts with demo, draft version 3f, metrics on http://127.0.0.1:7071/metrics"
        )[2]
        == "http://127.0.0.1:7071/metrics"
    )
