"""What the routes of one server share: the engine, the tokenizer, the phase, the room for requests, the metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, Protocol

from adaserve_jax.engine.client import EngineClient, EngineInfo
from adaserve_jax.errors import AdaServeError, QueueFullError
from adaserve_jax.server.errors import ApiError, of_code
from adaserve_jax.server.keyring import Keyring
from adaserve_jax.server.metrics import ServerMetrics
from adaserve_jax.server.observers import EndedChoice, Observer, Origin, tell
from adaserve_jax.server.responses import Health
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.types import SLO

Phase = Literal["starting", "ok", "draining"]


class TextCodec(Protocol):
    """The part of `models.tokenizer.Tokenizer` that the server uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def spelled(self, token_id: int) -> bytes | str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


class Slots:
    """Counts the choices that are queued or running; at most `limit`. Used from the event loop only."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0

    def reserve(self, count: int) -> Reservation:
        """Take room for `count` choices. Raises QueueFullError."""
        if self.used + count > self.limit:
            raise QueueFullError(
                f"{count} choices were asked for, {self.used} are in flight and at most {self.limit} may be; "
                "retry in a moment"
            )
        self.used += count
        return Reservation(self, count)


class Reservation:
    """Room that one HTTP request holds; given back choice by choice, or all at once."""

    def __init__(self, slots: Slots, count: int):
        self._slots = slots
        self._held = count

    def release(self, count: int | None = None) -> None:
        """Give back `count`, or all that is left; never more than is held."""
        count = self._held if count is None else min(count, self._held)
        self._held -= count
        self._slots.used -= count


class ServerState:
    """Lives as long as the app. Used from the event loop only."""

    def __init__(self, client: EngineClient, settings: ServerSettings):
        self.client = client
        self.settings = settings
        self.classes = settings.class_table()
        self.metrics = ServerMetrics(client)
        self.observers: list[Observer] = []
        self.slots = Slots(settings.max_inflight)
        self.keyring = Keyring(settings)
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

    def ended(self, choice: EndedChoice) -> None:
        """One choice has ended: count it, and tell whoever watches."""
        self.metrics.observe_end(choice)
        tell(self.observers, choice)

    def rejected(self, origin: Origin, slo: SLO, slo_class: str, choices: int, error: AdaServeError | ApiError) -> None:
        """So many choices of one request got no room, or the engine would not take them."""
        tpot_s = slo.tpot_s(self.info.baseline_s)
        for index in range(choices):
            self.ended(EndedChoice(
                origin.request_id, index, "rejected", error.code, origin.key, slo_class, time.time(), tpot_s,
                slo.ttft_s, None, origin.operation, origin.traceparent,
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
        if not self.client.is_alive():
            return Health(status="dead", detail="the engine ended; restart the server")
        if self.phase == "draining":
            return Health(status="draining", detail="the server finishes what it has and takes nothing new")
        return Health(status="ok", detail="requests are served")

    def require_ready(self) -> None:
        """Raises the 503 that fits when no request can be served."""
        health = self.health()
        codes = {"starting": "not_ready", "dead": "engine_dead", "draining": "shutting_down"}
        if health.status in codes:
            raise of_code(health.detail, codes[health.status])

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
