"""Whether drafting ahead pays: a draft service's core on a virtual clock, with real acceptance and measured times.

    python benchmarks/star_ahead.py --out benchmarks/results/star-ahead.json

The core is that of `adaserve draft`, without and with `--draft-ahead`. Targets of one request each follow texts that
the demo's target wrote at temperature 0.7; trees are the chains that the demo's draft drafts at each place of them
(star_chains.py), so what is accepted, what is guessed right, and how sure the draft is, are real. How long things take
is what star_table1.py measured on a quiet machine: S(n), t_v and t_c; a search of k levels takes (k + 1) / (d + 1) of
S(n) for the d that was measured, its catch-up counted as a level. Verification varies by a tenth, the same way in both.
So nothing here depends on how busy the machine is. benchmarks/star_ahead_paced.py measures the same by the clock.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from star_targets import Text

from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.star.core import Answers, DraftCore
from adaserve_jax.star.dispatch import Batch, BatchRow
from adaserve_jax.star.formulas import measured
from adaserve_jax.star.limits import DraftLimits, Quotas
from adaserve_jax.star.messages import Close, Draft, FromTarget, Hello, Open, Tree
from adaserve_jax.types import CandidateTrees

TARGETS = (1, 2, 3, 4)
DEPTHS = (1, 2, 3, 4)
LEVELS = DEPTHS[-1] + 1
"""Of the recorded chains: one more than of any tree, the own token behind it."""
TEXTS, NEW_TOKENS, TEMPERATURE, MAX_CONTEXT = 24, 192, 0.7, 512
SPREAD = 0.1
TABLE1 = Path(__file__).parent / "results" / "starsd" / "table1-cpu.json"
FOREVER_S = 1e9


@dataclass(frozen=True)
class Times:
    """service_s: S(n) of searches of `depth` levels; back_s: from an answer to the next Draft."""

    service_s: Mapping[int, float]
    depth: int
    back_s: float

    def batch_s(self, batch: Batch) -> float:
        return measured(self.service_s)(len(batch.rows)) * (batch.depth + 1) / (self.depth + 1)


@dataclass(frozen=True)
class AheadRow:
    """One number of targets at one depth. off, on: without and with it. ratio: of tokens/s. hits, made: trees that
    answered a round, and trees made ahead, of all rounds. load: share of the time that the device works for who waits;
    ahead_load: ahead. wait: in the queue, of a Draft."""

    n: int
    depth: int
    off_tokens_s: float
    on_tokens_s: float
    off_rounds_s: float
    on_rounds_s: float
    ratio: float
    hits: float
    made: float
    load_off: float
    load_on: float
    ahead_load: float
    wait_off_s: float
    wait_on_s: float


@dataclass
class _Target:
    """text: number of the one it follows; place: tokens of its output that are committed; told: of those, said."""

    name: str
    text: int = -1
    session: int = 0
    round: int = 0
    place: int = 0


class Replay:
    """One run until every text was followed `passes` times."""

    capacity = 2**31 - 1

    def __init__(
        self, texts: Sequence[Text], token: np.ndarray, log_f: np.ndarray, times: Times, *, n: int, depth: int,
        ahead: bool, passes: int = 1,
    ) -> None:  # fmt: skip
        self._texts, self._token, self._log_f, self._times, self._depth = texts, token, log_f, times, depth
        limits = DraftLimits("", "", "", 2**31 - 1, LEVELS, 1, 2**30, max_rows=max(TARGETS), max_feed=2**20)
        quotas = Quotas(messages_per_s=FOREVER_S, messages_at_once=2**30)
        self.core = DraftCore(limits, self, quotas=quotas, ahead=ahead)
        self._rng = np.random.default_rng(n)
        self._left: Iterator[int] = iter(
            list(itertools.islice(itertools.cycle(range(len(texts))), passes * len(texts)))
        )
        self._kv: dict[int, list[int]] = {}
        self._batch: Batch | None = None
        self._events: list[tuple[float, int, _Target | None]] = []
        self._added = 0
        self._heard: list[tuple[float, _Target]] = []
        """While a batch is on the device, when each came."""
        self.tokens, self.end_s, self.busy_s, self.ahead_s = 0, 0.0, 0.0, 0.0
        self._targets = {str(number): _Target(str(number)) for number in range(n)}

    # ---- room without an end ----

    def reserve(self, key: int, tokens: int) -> bool:
        return True

    def shrink(self, key: int, tokens: int) -> None:
        return None

    def release(self, key: int) -> None:
        self._kv.pop(key, None)

    # ---- the run ----

    def run(self) -> Replay:
        for number, target in enumerate(self._targets.values()):
            self.core.receive(target.name, [Hello(target.name, "", "")], 0.0)
            self._later(number * self._times.back_s / len(self._targets), target)
        while self._events:
            now, _, target = heapq.heappop(self._events)
            if target is None:
                self._landed(now)
            elif self._batch is None:
                self._ask(target, now, now)
            else:
                self._heard.append((now, target))
            if self._batch is None and (not self._events or self._events[0][0] > now):
                self._begin(now)
        return self

    def _later(self, at_s: float, target: _Target | None) -> None:
        heapq.heappush(self._events, (at_s, self._added, target))
        self._added += 1

    def _begin(self, now: float) -> None:
        self._batch = self.core.next_batch(now)
        if self._batch is not None:
            self._later(now + self._times.batch_s(self._batch), None)

    def _landed(self, now: float) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        if batch.ahead:
            self.ahead_s += now - batch.started_s
        else:
            self.busy_s += now - batch.started_s
        self._hear(self.core.done(batch, self._search(batch), now), now)
        heard, self._heard = self._heard, []
        for came_s, target in heard:
            self._ask(target, came_s, now)

    def _ask(self, target: _Target, came_s: float, now: float) -> None:
        """A Draft for what the text has now, taken in now; first the next text, where this one is over."""
        frame: list[FromTarget] = []
        before = target.place
        if target.text < 0 or target.place + self._depth + 1 > self._token.shape[1]:
            frame += [Close(target.session)] if target.session else []
            target.text = next(self._left, -1)
            if target.text < 0:
                self.core.receive(target.name, frame, came_s)
                return
            text = self._texts[target.text]
            target.session, target.place, target.round = target.session + 1, 0, 0
            frame.append(
                Open(target.session, 1, np.array(text.prompt, np.int32), text.seed, 0, TEMPERATURE, 0, 1.0, 0.0)
            )
            before = 0
        elif target.round:
            taken = self._taken(target)
            target.place += taken
            self.tokens += taken
        if target.place + self._depth + 1 > self._token.shape[1]:
            self._ask(target, came_s, now)
            return
        target.round += 1
        text = self._texts[target.text]
        new = np.array(text.output[before : target.place], np.int32)
        base = len(text.prompt) + before
        frame.append(Draft(target.session, 1, target.round, base, new, self._depth, 1, True, math.inf, FOREVER_S))
        answers = self.core.receive(target.name, frame, came_s)
        self._hear([(target.name, answers)], now)

    def _taken(self, target: _Target) -> int:
        """Tokens that its text has of the chain behind it, and an own one."""
        ahead = np.array(self._texts[target.text].output[target.place : target.place + self._depth])
        differs = np.flatnonzero(self._token[target.text, target.place, : self._depth] != ahead)
        return (int(differs[0]) if len(differs) else self._depth) + 1

    def _hear(self, answers: Answers, now: float) -> None:
        for name, messages in answers:
            for tree in messages:
                assert isinstance(tree, Tree), tree
                self.end_s = now
                spread = float(np.exp(self._rng.normal(-(SPREAD**2) / 2, SPREAD)))
                self._later(now + self._times.back_s * spread, self._targets[name])

    # ---- the draft ----

    def _search(self, batch: Batch) -> CandidateTrees:
        shape = len(batch.rows), batch.depth
        token, log_f = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
        for at, row in enumerate(batch.rows):
            kv = self._kv.setdefault(row.key, [])
            kv[row.start :] = row.tokens.tolist()
            drafted, chances = self._chain(row, kv)
            token[at, : row.depth], log_f[at, : row.depth] = drafted[: row.depth], chances[: row.depth]
        parent = np.broadcast_to(np.arange(-1, batch.depth - 1, dtype=np.int32), shape).copy()
        levels = np.arange(1, batch.depth + 1, dtype=np.int32)
        return CandidateTrees(token, parent, log_f, levels, np.zeros(shape, np.int32), np.zeros(shape, np.float32))

    def _chain(self, row: BatchRow, kv: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """What is drafted behind these tokens. Behind a guess that is wrong nobody reads it, but for the token looked
        for behind a path, which is the next of the chain that the path is of."""
        target, none = self._targets[row.target_id], (np.zeros(LEVELS, np.int32), np.full(LEVELS, -1.0, np.float32))
        if row.session != target.session or target.text < 0:
            return none
        text, place = target.text, len(kv) - len(self._texts[target.text].prompt)
        if (
            tuple(kv) == (self._texts[text].prompt + self._texts[text].output)[: len(kv)]
            and place < self._token.shape[1]
        ):
            return self._token[text, place], self._log_f[text, place]
        level = place - target.place
        if level != self._depth or row.depth != 1:
            return none
        token, log_f = self._token[text, target.place], self._log_f[text, target.place]
        return token[level:], log_f[level:] - log_f[level - 1]


def row_of(off: Replay, on: Replay, n: int, depth: int) -> AheadRow:
    """Both runs side by side."""
    stats = on.core.stats
    return AheadRow(
        n, depth, off.tokens / off.end_s, on.tokens / on.end_s, off.core.stats.rounds / off.end_s,
        stats.rounds / on.end_s, (on.tokens / on.end_s) / (off.tokens / off.end_s), stats.ahead_hits / stats.rounds,
        stats.ahead_trees / stats.rounds, off.busy_s / off.end_s, on.busy_s / on.end_s, on.ahead_s / on.end_s,
        off.core.stats.queue_s / off.core.stats.trees, stats.queue_s / stats.trees,
    )  # fmt: skip


def times_of(table1: Mapping[str, Any]) -> Times:
    """As star_table1.py wrote them."""
    service_s = {int(n): seconds for n, seconds in table1["service_s"].items()}
    return Times(service_s, table1["shape"]["depth"], table1["verify_s"] + table1["network_s"])


def star_ahead(
    out: Annotated[Path, typer.Option(help="file to write; texts and chains are kept beside it")],
    target: Annotated[str, typer.Option(help="whose texts")] = "demo",
    texts: Annotated[int, typer.Option(help="how many")] = TEXTS,
    table1: Annotated[Path, typer.Option(help="what star_table1.py wrote: S(n), t_v and t_c")] = TABLE1,
) -> None:
    """Draft along the texts once, then replay every number of targets and every depth without and with it."""
    from star_chains import chains_of  # these import jax
    from star_texts import texts_of

    if texts < 1:
        raise ConfigError(f"--texts must be at least 1, got {texts}")
    written = texts_of(
        target, out.with_suffix(".texts"), count=texts, new_tokens=NEW_TOKENS, temperature=TEMPERATURE,
        max_context=MAX_CONTEXT,
    )  # fmt: skip
    chains = chains_of(written, out.with_suffix(".npz"), levels=LEVELS, max_context=MAX_CONTEXT)
    of = json.loads(table1.read_text())
    rows = []
    for depth in DEPTHS:
        for n in TARGETS:
            off, on = (
                Replay(written, chains.token, chains.log_f, times_of(of), n=n, depth=depth, ahead=ahead).run()
                for ahead in (False, True)
            )
            rows.append(row_of(off, on, n, depth))
            typer.echo(str(rows[-1]))
    about = {
        "commit": source_commit(), "target": target, "texts": texts, "new_tokens": NEW_TOKENS,
        "temperature": TEMPERATURE, "spread": SPREAD,
        "times": {name: of[name] for name in ("service_s", "verify_s", "network_s", "machine", "commit", "draft")},
        "times_depth": of["shape"]["depth"],
        "command": shlex.join(["python", "benchmarks/star_ahead.py", *sys.argv[1:]]),
    }  # fmt: skip
    out.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    try:
        typer.run(star_ahead)
    except AdaServeError as error:
        sys.exit(f"error: {error}")
