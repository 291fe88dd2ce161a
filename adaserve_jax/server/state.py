"""State that the routes of one server share: engine, tokenizer, phase, admission, API keys, metrics, observers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, Literal, Protocol

from adaserve_jax.constraints.reasoning_formats import ReasoningMarks, marks_of
from adaserve_jax.engine.client import EngineClient, EngineInfo, EngineStats
from adaserve_jax.errors import AdaServeError
from adaserve_jax.models.chat_prompt import AT_ONCE, PLAIN_CHAT, ChatPrompt
from adaserve_jax.server.admission import QueueAdmission, Reservation, Slots
from adaserve_jax.server.auth import Account, Keyring
from adaserve_jax.server.errors import ApiError, from_code
from adaserve_jax.server.metrics import ServerMetrics
from adaserve_jax.server.observers import EndedChoice, Observer, Origin, notify
from adaserve_jax.server.schema import Health, HealthStatus
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.types import SLO

Phase = Literal["starting", "ok", "draining"]
CODE_OF_STATUS = {
    "starting": "not_ready",
    "restarting": "engine_restarting",
    "stalled": "engine_stalled",
    "dead": "engine_dead",
    "draining": "shutting_down",
}
"""Error code of a request that comes while the server is not ok, by the status of its health."""
_log = logging.getLogger(__name__)


class TextCodec(Protocol):
    """Part of `models.tokenizer.Tokenizer` that the server uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    longest_token: int

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def spelled(self, token_id: int) -> bytes | str: ...

    def id_of(self, text: str) -> int | None: ...

    @property
    def chat_template(self) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], prompt: ChatPrompt = PLAIN_CHAT
    ) -> list[int]: ...


class Mailbox:
    """Calls posted from any thread, made on the event loop in order; calls posted together wake the loop once."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
        """Make `call(*arguments)` on the loop soon; do nothing when the loop is closed."""
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


class ServerState:
    """State of one server for as long as its app lives. Used from the event loop only.

    in_flight: ids of the requests that the engine has. longest_token: most bytes that one token of the model stands
    for. marks: those between which the model thinks; None: it has none. template_threads: threads that render the chat
    templates of clients, so that nothing else waits for them.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings):
        self.client = client
        self.settings = settings
        self.classes = settings.class_table()
        self.metrics = ServerMetrics(client, settings.served_model_name)
        self.observers: list[Observer] = []
        self.mailbox = Mailbox()
        self.slots = Slots(settings.max_inflight)
        self.keyring = Keyring(settings)
        self.admission = QueueAdmission(settings.max_queue_wait)
        self.template_threads = ThreadPoolExecutor(AT_ONCE, "chat-template")
        self.created = int(time.time())
        self.phase: Phase = "starting"
        self.in_flight: set[str] = set()
        self.longest_token = 0
        self.marks: ReasoningMarks | None = None
        self._tokenizer: TextCodec | None = None

    def become_ready(self, tokenizer: TextCodec) -> None:
        """Take requests from now on: the engine has started. Raises ConfigError: see `marks_of`."""
        self.marks = marks_of(self.settings.reasoning_parser, tokenizer)
        self._tokenizer = tokenizer
        self.longest_token = tokenizer.longest_token
        if self.phase == "starting":
            self.phase = "ok"

    def drain(self) -> None:
        """Take no new requests."""
        self.phase = "draining"

    def abort_all(self) -> None:
        """Stop every request that the engine still has."""
        for request_id in list(self.in_flight):
            self.client.abort(request_id)

    @property
    def is_busy(self) -> bool:
        """True while a request holds room."""
        return self.slots.used > 0

    def health(self) -> Health:
        if self.phase == "starting":
            return Health(status="starting", detail="the engine loads and compiles")
        alive = self.client.is_alive()  # before stats: whether an engine that ends now comes back is then known
        stats = self.client.stats()
        status, detail = self._status(stats, alive or self.client.is_alive())
        crash = stats.last_crash
        if crash is None:
            return Health(status=status, detail=detail)
        return Health(
            status=status, detail=detail, restarts=stats.restarts, last_crash=crash.why, last_crash_unix_s=crash.unix_s
        )

    def _status(self, stats: EngineStats, alive: bool) -> tuple[HealthStatus, str]:
        """Return what the server does, and the same in words."""
        limit_s = self.settings.watchdog
        why = "" if stats.last_crash is None else f" ({stats.last_crash.why})"
        if stats.back_in_s is None and not alive:
            return "dead", f"the engine ended{why}; restart the server"
        if self.phase == "draining":
            return "draining", "the server finishes what it has and takes nothing new"
        if stats.back_in_s is not None:
            return "restarting", f"the engine ended{why} and is started again; retry in a few seconds"
        if 0 < limit_s < stats.step_age_s:
            waited = f"no step was completed for {stats.step_age_s:.0f} s, more than {limit_s:g} s"
            return "stalled", f"requests wait and {waited}"
        return "ok", "requests are served"

    def require_ready(self) -> None:
        """Raise the 503 that fits when no request can be served."""
        health = self.health()
        if health.status != "ok":
            raise from_code(health.detail, CODE_OF_STATUS[health.status], retry_after_s=self.client.stats().back_in_s)

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or PurePath(self.info.target).name

    @property
    def tokenizer(self) -> TextCodec:
        self.require_ready()
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's values for sampling fields that a request leaves out; OpenAI's defaults come after them."""
        return self.info.defaults.given() if self.settings.use_generation_config else {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; works in any phase after the start and on any thread."""
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids)

    def require_model(self, name: str | None) -> str:
        """Return the adapter that `name` is, "" for the model alone. Raises 503 when nothing is served, 404 when it is
        another model."""
        self.require_ready()
        if name is None or name == self.model_name:
            return ""
        if name in self.info.adapters:
            return name
        served = ", ".join(repr(each) for each in (self.model_name, *self.info.adapters))
        raise ApiError(
            404, f"model {name!r} is not served here; this server has {served}", code="model_not_found", param="model"
        )

    def admit(
        self, account: Account, choices: int, max_tokens: int, slo: SLO, priority: int, max_queue_s: float = 0.0
    ) -> Reservation:  # fmt: skip
        """Reserve room for choices of at most so many tokens each.

        Raises RateLimited, OverloadedError (their turn comes too late), QueueFullError.
        """
        account.require_room(choices)
        patience_s = min((each for each in (slo.ttft_s, slo.e2e_s) if each is not None), default=None)
        deadline_key_s = self.info.deadline_key_s(time.monotonic(), priority, patience_s)
        self.admission.check(self._wait_s(deadline_key_s, max_tokens, choices), slo.ttft_s, slo.e2e_s, max_queue_s)
        return self.slots.reserve(account, choices, deadline_key_s, max_tokens)

    def retry_after_s(self) -> float | None:
        """Return the seconds after which a request that waited too long may come again; None where it is unknown."""
        wait_s = self._wait_s(math.inf, 1, 1)
        return max(wait_s - self.admission.max_wait_s, 0.0) if wait_s else self.client.stats().back_in_s

    def _wait_s(self, deadline_key_s: float, max_tokens: int, choices: int) -> float:
        steps = self.client.stats().scheduler
        self.admission.observe_engine(steps.running, steps.waiting - steps.preparing, self.info.max_requests)
        return self.admission.wait_s(self.slots, deadline_key_s, max_tokens, choices)

    def ended(self, choice: EndedChoice) -> None:
        """Report a choice that ended to admission, metrics and observers."""
        if choice.metrics is not None:
            self.admission.learn(choice.metrics, stopped=choice.ending == "stop")
        self.metrics.observe_end(choice)
        notify(self.observers, choice)

    def rejected(
        self, origin: Origin, slo: SLO, slo_class: str, choices: range, error: AdaServeError | ApiError
    ) -> None:
        """Report the choices of one request, by index, that got no room or that the engine did not take."""
        tpot_s = slo.tpot_s(self.info.baseline_s)
        for index in choices:
            self.ended(EndedChoice(
                origin, index, "rejected", error.code, slo_class, tpot_s, slo.ttft_s,
                thinking_tpot_slo_s=slo.thinking_tpot_s, e2e_slo_s=slo.e2e_s,
            ))  # fmt: skip
