"""Targets that are whole engines: the real target model verifies, where a paced one (targets.py) sleeps.

Each process is an `LLM` with one request at a time, at a draft service or with a draft or head in its own process. It
goes through the same texts, so that what it makes of a prompt can be held against what the target made of it alone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import RequestError
from adaserve_jax.types import SamplingParams
from benchmarks.starsd.runs import MAX_CONTEXT, SETTLE_S, Run, Targets, begun, expect_ready, medians, spread, targets_at
from benchmarks.starsd.service import Service
from benchmarks.starsd.targets import DEADLINE_MS, Tally, Text

if TYPE_CHECKING:
    from adaserve_jax import LLM

MAX_BATCH_TOKENS = 64
"""Of one step of an engine: a chunk of a prompt, or a chain. Few, so that little has to be compiled."""


@dataclass(frozen=True)
class Engine:
    """What an engine is. target: folder of its model; draft: that of its own draft, None: a service drafts. depth: of
    its chains."""

    target: str
    draft: str | None
    depth: int


@dataclass
class Engines(Tally):
    """A Tally of a real engine: rounds and steps are one, of one request; slept_s is what verifications took. texts,
    same: texts that were ended, and those of them that are what the target alone made of the prompt."""

    texts: int = 0
    same: int = 0


def run_engine(port: Connection, service: int, number: int, texts: Sequence[Text], engine: Engine) -> None:
    """The process of one target, told what `targets.run_target` is told. service: the port of the draft service,
    where the engine has no draft of its own."""
    from adaserve_jax import LLM

    remote = None
    if engine.draft is None:
        remote = DrafterConfig((f"grpc://127.0.0.1:{service}",), drafter_deadline_ms=DEADLINE_MS)
    with LLM(
        engine.target, engine.draft, f"spec:{engine.depth}", drafter=remote, dtype="f32",
        max_requests=1, max_context=MAX_CONTEXT, max_batch_tokens=MAX_BATCH_TOKENS, max_depth=engine.depth, max_width=1,
        prefix_cache=False,
    ) as llm:  # fmt: skip
        loop = _Loop(llm, texts, number * len(texts) // 6)
        port.send("ready")
        try:
            while (said := port.recv()) != "end":
                if said == "tally":
                    port.send((loop.tally(), time.monotonic()))
                else:
                    loop.run(said == "run")
        finally:
            loop.end()


class _Loop:
    """Goes through the texts in a thread of its own while it is told to run. first: the text that it begins with."""

    def __init__(self, llm: LLM, texts: Sequence[Text], first: int) -> None:
        self._llm = llm
        self._texts = itertools.cycle([*texts[first:], *texts[:first]])
        self._runs, self._ends = threading.Event(), threading.Event()
        self._ended, self._same = 0, 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def run(self, runs: bool) -> None:
        """Whether requests follow each other; one that is running when they shall not is aborted."""
        if runs:
            self._runs.set()
        else:
            self._runs.clear()

    def tally(self) -> Engines:
        """Since the engine is ready. Raises what ended the loop."""
        if self._error is not None:
            raise self._error
        stats = self._llm.stats()
        steps, drafter = stats.scheduler, stats.drafter
        drafted, round_s = (steps.spec_steps, steps.draft_s) if drafter is None else (drafter.rounds, drafter.round_s)
        return Engines(
            steps.spec_steps, steps.generation_tokens, steps.accepted_tokens, steps.steps, steps.verify_s, drafted,
            round_s, self._ended, self._same,
        )  # fmt: skip

    def end(self) -> None:
        self._ends.set()
        self._runs.set()
        self._thread.join(30)

    def _serve(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self._error = error

    def _follow(self) -> None:
        for text in self._texts:
            self._runs.wait()
            if self._ends.is_set():
                return
            found = self._made_of(text)
            if found is not None:
                self._ended += 1
                self._same += found == list(text.output)

    def _made_of(self, text: Text) -> list[int] | None:
        """The tokens that follow the prompt; None where it was told to pause before the end."""
        sampling = SamplingParams(
            max_tokens=len(text.output), temperature=text.temperature, seed=text.seed, ignore_eos=True
        )
        tokens: list[int] = []
        for chunk in self._llm.stream(list(text.prompt), sampling):
            if chunk.error is not None:
                raise RequestError(f"a target's request failed: {chunk.error}")
            tokens += chunk.token_ids
            if not self._runs.is_set() or self._ends.is_set():
                return None
        return tokens


class EngineRuns:
    """One to `count` engines at each service, and one with each draft in its own process, measured like paced ones.
    Processes are begun one after another, so that later ones find compiled programs in the cache."""

    def __init__(
        self, held: ExitStack, services: dict[bool, Service], count: int, texts: Sequence[Text], target: Path,
        own: Mapping[str, Path], depth: int,
    ) -> None:  # fmt: skip
        """services: by whether requests are drafted together. own: drafts and heads by name, each of an engine that
        has it in its own process."""
        self._services, self._count, self._target = services, count, target
        engine = Engine(str(target), None, depth)
        self._there = {
            batched: held.enter_context(targets_at(at, count, run_engine, texts, engine, in_turn=True))
            for batched, at in services.items()
        }
        self._alone = {}
        for name, draft in own.items():
            self._alone[name] = begun(held, run_engine, 0, 0, texts, replace(engine, draft=str(draft)), end="end")
            expect_ready(self._alone[name])
        self._runs: list[Run] = []
        self._colocated: dict[str, list[dict[str, float]]] = {name: [] for name in own}

    def measure(self, seconds: float, number: int) -> None:
        """One round: every number of engines at each service, and those with a draft of their own."""
        for name, port in self._alone.items():
            self._colocated[name].append(_of_alone(port, seconds))
        for n in range(1, self._count + 1):
            for batched, at in self._services.items():
                self._runs.append(self._there[batched].run(at, n, seconds, batched=batched, round=number))

    def report(self) -> dict[str, Any]:
        """Rows as those of paced targets."""
        ended = sum(run.tally.texts for run in self._runs if isinstance(run.tally, Engines))
        same = sum(run.tally.same for run in self._runs if isinstance(run.tally, Engines))
        return {
            "target": self._target.name, "texts": ended, "same_texts": same,
            "verify_s": sum(run.tally.slept_s for run in self._runs) / sum(run.tally.steps for run in self._runs),
            "rows": [row.as_dict() for row in medians(self._runs)], "spread": spread(self._runs),
            "colocated": self._colocated, "runs": [asdict(run) for run in self._runs],
        }  # fmt: skip


def _of_alone(port: Connection, seconds: float) -> dict[str, float]:
    """Measure an engine with a draft of its own."""
    port.send("run")
    time.sleep(SETTLE_S)
    ((before, began),) = Targets.tallies([port])
    time.sleep(seconds)
    ((after, ended),) = Targets.tallies([port])
    port.send("pause")
    found, lasted = after - before, ended - began
    return {
        "throughput_tps": found.tokens / lasted, "rounds_per_s": found.rounds / lasted,
        "service_s": found.round_s / max(found.drafted, 1),
    }  # fmt: skip
