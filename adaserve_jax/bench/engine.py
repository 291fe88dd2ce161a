"""What a bench run needs of an engine: open-loop runs, a change of policy, and what to say of it in the rows.

An engine is in this process (`client_engine.py`, `local.py`) or behind a URL; the runner cannot tell which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adaserve_jax.bench.open_loop import Due, LoopResult
from adaserve_jax.bench.recording import AcceptanceRecorder
from adaserve_jax.bench.workload import WorkloadItem
from adaserve_jax.stats import StepStats
from adaserve_jax.types import SLO

OnFlight = Callable[[int], None]
"""on_flight(requests in flight), called often and from any thread: it notes the number and returns."""


@dataclass(frozen=True)
class EngineAbout:
    """What a ready engine is, for the rows. system: this package, or the name that was given to a URL. policies: those
    that it can serve by; None: any of this package's. baseline_s: seconds of one token, alone, without speculation."""

    system: str
    device: str
    jax_version: str
    target: str
    draft: str | None
    target_params: int | None
    draft_params: int | None
    deterministic: bool
    max_requests: int
    max_context: int
    baseline_s: float
    max_prefill_tokens: int = 0
    policies: tuple[str, ...] | None = None

    def columns(self) -> dict[str, Any]:
        """What all rows of a run have of it, and agree in, by column."""
        return {name: value for name, value in vars(self).items() if name not in ("system", "baseline_s", "policies")}


@dataclass(frozen=True)
class Ask:
    """One request to make ready. seed: of its sampling, the item's own where that counts. cache_salt: requests of other
    salts share no cached KV with it. max_tokens: the item's, or fewer for a warm-up."""

    request_id: str
    item: WorkloadItem
    seed: int
    slo: SLO
    cache_salt: str
    max_tokens: int


class BenchEngine(Protocol):
    """One ready engine that serves every policy of a run in turn."""

    @property
    def about(self) -> EngineAbout: ...

    def prepare(self, ask: Ask) -> object:
        """Tokenise or encode ahead, so that the client does nothing but submit during a run."""
        ...

    def drive(self, due: Sequence[Due], *, drain_s: float, on_progress: OnFlight | None = None) -> LoopResult:
        """Submit in order of due_s and on time, whatever the engine does; then wait at most drain_s, cut off what is
        left. Ctrl-C stops submitting and cuts off likewise."""
        ...

    def set_policy(self, name: str) -> None:
        """Serve by `name` from now on; called only while no request is in flight. Raises ConfigError: no such policy
        here."""
        ...

    def stats(self) -> StepStats | None:
        """What its scheduler counts; None where that cannot be seen from here."""
        ...

    @property
    def token_source(self) -> str:
        """How the tokens of the last `drive` were counted: see the column."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on the last `drive` that people should read."""
        ...

    def compiles_after_ready(self) -> int:
        """Programs compiled while serving; 0 where unknown."""
        ...

    def close(self) -> None: ...


class RecordingEngine(BenchEngine, Protocol):
    """An engine that was opened to note acceptance."""

    @property
    def recorder(self) -> AcceptanceRecorder:
        """What verifications revealed since it was last taken."""
        ...


OpenEngine = Callable[[str], BenchEngine]
"""open_engine(policy): a started engine that serves by `policy`."""
