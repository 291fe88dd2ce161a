"""What the routes of one server share: the engine, the tokenizer, the phase, the room for requests, the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, Protocol

from adaserve_jax.engine.client import EngineClient, EngineInfo
from adaserve_jax.errors import AdaServeError
from adaserve_jax.scheduler.queue import due_s
from adaserve_jax.server.admission import Admission, Reservation, Slots
from adaserve_jax.server.auth import Keyring
from adaserve_jax.server.errors import ApiError, of_code
from adaserve_jax.server.metrics import ServerMetrics
from adaserve_jax.server.observers import EndedChoice, Observer, Origin, tell
from adaserve_jax.server.schema import Health
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.types import SLO

# From an engine's thread to the event loop: calls that come together wake the loop once. Knows no engine.

_log = logging.getLogger(__name__)


class Mailbox:
    """Calls made on one event loop in the order in which any threads post them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
        """Make `call(*arguments)` on the loop, soon; nothing when the loop is closed."""
        self._calls.append((call, arguments))
        if not self._woken and not loop.is_closed():
            self._woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from here on wakes the loop again, or is seen below
        while self._calls:
            call, arguments = self._calls.popleft()
            try:
                call(*arguments)
            except Exception:  # one request's bug must not keep the others' tokens
                _log.exception("a chunk could not be delivered")


Phase = Literal["starting", "ok", "draining"]
CODE_OF_STATUS = {
    "starting": "not_ready",
    "restarting": "engine_restarting",
    "stalled": "engine_stalled",
    "dead": "engine_dead",
    "draining": "shutting_down",
}
"""Why a request is refused while the server is not ok."""


class TextCodec(Protocol):
    """The part of `models.tokenizer.Tokenizer` that the server uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def spelled(self, token_id: int) -> bytes | str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


class ServerState:
    """Lives as long as the app. Used from the event loop only."""

    def __init__(self, client: EngineClient, settings: ServerSettings):
        self.client = client
        self.settings = settings
        self.classes = settings.class_table()
        self.metrics = ServerMetrics(client)
        self.observers: list[Observer] = []
        self.mailbox = Mailbox()
        self.slots = Slots(settings.max_inflight)
        self.keyring = Keyring(settings)
        self.admission = Admission(settings.max_queue_wait)
        self.created = int(time.time())
        self.phase: Phase = "starting"
        self.in_flight: set[str] = set()  # request ids that the engine has
        self._tokenizer: TextCodec | None = None

    def become_ready(self, tokenizer: TextCodec) -> None:
        """The engine has started: take requests from now on."""
        self._tokenizer = tokenizer
        if self.phase == "starting":
            self.phase = "ok"

    def drain(self) -> None:
        """Take no new requests."""
        self.phase = "draining"

    @property
    def is_busy(self) -> bool:
        """Whether a request has room that it has not given back."""
        return self.slots.used > 0

    def admit(self, choices: int, slo: SLO, priority: int) -> Reservation:
        """Room for so many choices. Raises OverloadedError when their turn would come too late, QueueFullError."""
        steps, slots = self.client.stats().scheduler, self.slots
        now = time.monotonic()
        due = due_s(now, priority, slo.ttft_s)
        self.admission.see(steps.running, steps.waiting, self.info.max_requests)
        ahead = slots.ahead(due) + choices - 1  # of the last of them
        begun, overtakers = slots.used - len(slots.waiting), self.admission.overtakers.expected(now, due)
        wait_s = self.admission.wait_s(ahead, begun, slo.ttft_s is not None, overtakers)
        self.admission.check(wait_s, slo.ttft_s)
        reservation = slots.reserve(choices, due, wait_s)
        self.admission.overtakers.add(now, due, choices)
        return reservation

    def ended(self, choice: EndedChoice) -> None:
        """One choice has ended: count it, learn from it, and tell whoever watches."""
        if choice.metrics is not None:
            self.admission.learn(choice.metrics)
        self.metrics.observe_end(choice)
        tell(self.observers, choice)

    def rejected(
        self, origin: Origin, slo: SLO, slo_class: str, choices: range, error: AdaServeError | ApiError
    ) -> None:
        """These choices of one request, by index, got no room, or the engine would not take them."""
        tpot_s = slo.tpot_s(self.info.baseline_s)
        for index in choices:
            self.ended(origin.ended(
                index, "rejected", error.code, slo_class=slo_class, tpot_slo_s=tpot_s, ttft_slo_s=slo.ttft_s,
            ))  # fmt: skip

    def abort_all(self) -> None:
        """Stop every request that the engine still has."""
        for request_id in list(self.in_flight):
            self.client.abort(request_id)

    @property
    def tokenizer(self) -> TextCodec:
        self.require_ready()
        assert self._tokenizer is not None
        return self._tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, in any phase after the start and on any thread."""
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids)

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """What stands in for sampling fields that a request leaves out, before OpenAI's defaults do."""
        return self.info.defaults.given() if self.settings.use_generation_config else {}

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or PurePath(self.info.target).name

    def health(self) -> Health:
        if self.phase == "starting":
            return Health(status="starting", detail="the engine loads and compiles")
        alive = self.client.is_alive()  # first: an engine that ends now is then known to come back, or not
        stats, limit_s = self.client.stats(), self.settings.watchdog
        if stats.back_in_s is None and not (alive or self.client.is_alive()):
            return Health(status="dead", detail="the engine ended; restart the server")
        if self.phase == "draining":
            return Health(status="draining", detail="the server finishes what it has and takes nothing new")
        if stats.back_in_s is not None:
            return Health(status="restarting", detail="the engine ended and is started again; retry in a few seconds")
        if 0 < limit_s < stats.step_age_s:
            return Health(
                status="stalled",
                detail=f"requests wait and no step was completed for {stats.step_age_s:.0f} s, more than {limit_s:g} s",
            )
        return Health(status="ok", detail="requests are served")

    def require_ready(self) -> None:
        """Raises the 503 that fits when no request can be served."""
        health = self.health()
        if health.status != "ok":
            raise of_code(health.detail, CODE_OF_STATUS[health.status], retry_after_s=self.client.stats().back_in_s)

    def require_model(self, name: str | None) -> None:
        """Raises 503 when nothing is served, 404 when `name` is another model."""
        self.require_ready()
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; this server has {self.model_name!r}",
                code="model_not_found",
                param="model",
            )
