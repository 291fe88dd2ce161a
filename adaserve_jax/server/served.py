"""Turns what observers are told into what is kept: adds the engine's names, wall-clock times, and the text if asked.

Runs on the threads of records and traces; the event loop only notes what passes with time.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import adaserve_jax
from adaserve_jax.engine.client import EngineInfo
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.results.served import ServedChoice, ServerRun, served_choice, unbegun
from adaserve_jax.server.observers import ChoiceText, EndedChoice
from adaserve_jax.server.state import ServerState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Noted:
    """An end as the event loop noted it. clock_s: what was added to the engine's clock at that moment gives Unix time.

    The engine's clock is the machine's monotonic one, the same in all processes, so that it is read here.
    """

    ended: EndedChoice
    run: ServerRun
    clock_s: float


class Notes:
    """Notes ends, on the event loop."""

    def __init__(self, state: ServerState):
        self._state = state
        self._engine: tuple[EngineInfo, int] | None = None  # of the run: and how many were there before
        self._run: ServerRun | None = None

    def of(self, ended: EndedChoice) -> Noted:
        """Raises EngineDeadError when no engine was ever ready."""
        clock_s = ended.ended_unix_s - time.monotonic()
        return Noted(ended, self._current(ended.ended_unix_s), clock_s)

    def _current(self, now_unix_s: float) -> ServerRun:
        """The run of the engine there is; of the last one, once it is dead."""
        try:
            info = self._state.info
        except EngineDeadError:
            if self._run is None:
                raise
            return self._run
        engine = info, self._state.client.stats().restarts
        if self._run is None or engine != self._engine:
            self._engine = engine
            self._run = ServerRun(
                uuid.uuid4().hex, now_unix_s, adaserve_jax.__version__, info.jax_version, info.device, info.policy,
                self._state.model_name, info.target, info.draft, info.baseline_s,
            )  # fmt: skip
        return self._run


class Served:
    """Makes records of notes, on one thread, and knows the acceptance so far.

    decode: the text of a prompt's token ids; None: texts are left out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None = None):
        self._decode = decode
        self._drafted = 0
        self._accepted = 0

    def of(self, noted: Noted) -> ServedChoice:
        ended, metrics = noted.ended, noted.ended.metrics
        if metrics is None:
            arrival_unix_s = ended.ended_unix_s
            metrics = unbegun(ended.tpot_slo_s, ended.ttft_slo_s, ended.slo_class, ended.error_code)
        else:
            arrival_unix_s = metrics.arrival_s + noted.clock_s
        self._drafted += metrics.drafted_tokens
        self._accepted += metrics.accepted_tokens
        prompt, output = self._texts(ended.text)
        return served_choice(
            metrics,
            run=noted.run,
            request_id=ended.request_id,
            choice=ended.index,
            key=ended.key,
            ending=ended.ending,
            error_code=ended.error_code,
            arrival_unix_s=arrival_unix_s,
            ended_unix_s=ended.ended_unix_s,
            acceptance_rate=self._accepted / self._drafted if self._drafted else 0.0,
            prompt=prompt,
            output=output,
        )

    def _texts(self, text: ChoiceText | None) -> tuple[str | None, str | None]:
        """Prompt and output, as far as they are to be kept."""
        if text is None or self._decode is None:
            return None, None
        output = _storable(text.output)
        try:
            return _storable(self._decode(text.prompt_ids)), output
        except Exception:
            _log.exception("a prompt cannot be decoded; its record goes without")
            return None, output


def _storable(text: str) -> str:
    """Without lone surrogates, which no file takes."""
    return text.encode(errors="replace").decode()
