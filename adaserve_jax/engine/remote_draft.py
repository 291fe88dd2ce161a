"""Connection of an engine to draft services: the drafter, and the estimated times of drafting.

A service reports the times of its device, and the network round trip is measured in a session that is thrown away. If
no service answers, the engine starts on guessed times, until the first service that answers reports its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.warmup import decode_plan, draft_plan
from adaserve_jax.scheduler.cost_model import CostGrid
from adaserve_jax.star.messages import Hello, Welcome, cells_hash
from adaserve_jax.stats import DrafterStats
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import CostSamples, Drafter, DraftSessions, Limits

CONNECT_S = 5.0
"""Seconds that the start waits for a first service to answer."""
TRIALS = 8
"""Rounds in which the round trip to a service is measured."""
GUESSED_SHARE = 0.125
"""Guessed time of a draft level, as a share of the target's time for as many tokens: that of a draft with an eighth of
the target's parameters."""
GUESSED_ROUND_TRIP_S = 0.002
"""Guessed round trip: about that of two hosts in one data centre."""
_log = logging.getLogger(__name__)


class ServiceDrafter(Drafter, DraftSessions, Protocol):
    """Interface of `star.client.drafter.RemoteDrafter` that an engine uses."""

    def connect(self, timeout_s: float) -> Welcome | None: ...

    def stats(self) -> DrafterStats: ...

    def count_anew(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Drafting:
    """Drafter of an engine, connected or connecting, and step times that include drafting.

    guessed: the drafting times are a guess, since no service has answered yet.
    """

    drafter: ServiceDrafter
    samples: CostSamples
    guessed: bool = False


def check_packages() -> None:
    """Raise ConfigError if a package of the `star` extra is not installed."""
    for package, module in (("grpc", "grpc"), ("protobuf", "google.protobuf")):
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ConfigError(f"drafter needs {package}, which is missing: pip install 'adaserve-jax[star]'")


def check_files(config: DrafterConfig) -> None:
    """Raise ConfigError if a file that `config` names cannot be used, before minutes of compiling."""
    from adaserve_jax.star.client.channel import GrpcTransport  # imports gRPC

    GrpcTransport(config.addresses[0], config)


def connect_drafter(
    config: DrafterConfig, chances: ChanceTable, tokenizer: Tokenizer, samples: CostSamples, limits: Limits,
    vocab_size: int,
) -> Drafting:  # fmt: skip
    """Connect to the services and wait up to CONNECT_S for a first one; the others connect in the background.

    Chances, tokenizer, samples, limits and vocab_size are the target's; a service must have the same vocabulary.
    """
    hello = hello_of(config, chances, tokenizer, samples, limits, vocab_size)
    drafter = build_drafter(config, chances, hello, limits.max_requests, vocab_size)
    try:
        return wait_for_service(drafter, samples, limits)
    except BaseException:
        drafter.close()
        raise


def build_drafter(
    config: DrafterConfig, chances: ChanceTable, hello: Hello, max_rows: int, vocab_size: int
) -> ServiceDrafter:  # fmt: skip
    """Build the drafter, which begins to connect. `check_packages` comes first."""
    from adaserve_jax.star.client.channel import GrpcTransport  # imports gRPC
    from adaserve_jax.star.client.drafter import RemoteDrafter

    transports = [GrpcTransport(address, config) for address in config.addresses]
    return RemoteDrafter(transports, config, hello=hello, table=chances, max_rows=max_rows, vocabulary=vocab_size)


def hello_of(
    config: DrafterConfig, chances: ChanceTable, tokenizer: Tokenizer, samples: CostSamples, limits: Limits,
    vocab_size: int,
) -> Hello:  # fmt: skip
    """Build the greeting of this target; its times are those of one request."""
    grid = CostGrid(samples, limits)
    return Hello(
        target_id=f"{os.getpid()}-{secrets.token_hex(8)}",
        vocabulary_hash=tokenizer.vocabulary_hash(vocab_size),
        cells_hash=cells_hash(chances),
        draft_version=config.drafter_version,
        verify_s=grid.verify_s(1 + limits.max_depth, 1, samples.context),
        plain_s=grid.verify_s(1, 1, samples.context),
    )


def wait_for_service(drafter: ServiceDrafter, samples: CostSamples, limits: Limits) -> Drafting:
    """Wait up to CONNECT_S for a service and measure the round trip to it.

    The scheduler plans within the configured depth and width, whatever the services search: each is asked for no more
    than it searches, and services come and go.
    """
    welcome = drafter.connect(CONNECT_S)
    if welcome is None:
        services = drafter.stats().services.items()
        states = "; ".join(f"{address}: {state.reason or state.breaker}" for address, state in services)
        _log.warning(
            "no draft service answered within %g s (%s): serving without drafts, and connecting meanwhile", CONNECT_S,
            states,
        )  # fmt: skip
        return Drafting(drafter, guess_times(samples, limits), guessed=True)
    _warn_of_smaller_limits(welcome, limits)
    fed_s = min(welcome.catchup_s.items())[1] if welcome.catchup_s else 0.0
    served_s = fed_s + (_level_s(welcome, 1, 1) if welcome.level_s else 0.0)  # a round of one row and one level
    return Drafting(drafter, with_drafting(samples, limits, welcome, round_trip_s(drafter, limits, served_s)))


def retime(found: Drafting, limits: Limits) -> Drafting | None:
    """Replace guessed times by those of the first service that answered; None if none has. Returns at once.

    The round trip stays a guess, which steps correct: it cannot be measured while requests run.
    """
    welcome = found.drafter.connect(0.0)
    if welcome is None:
        return None
    _warn_of_smaller_limits(welcome, limits)
    _log.info("a draft service has answered: drafting is planned by the times that it measured")
    return Drafting(found.drafter, with_drafting(found.samples, limits, welcome, GUESSED_ROUND_TRIP_S))


def _warn_of_smaller_limits(welcome: Welcome, limits: Limits) -> None:
    """Warn if a service searches smaller trees or contexts than this engine is configured for."""
    said = (welcome.max_depth, welcome.max_width, welcome.max_context)
    wanted = (limits.max_depth, limits.max_width, limits.max_context)
    if any(has < needed for has, needed in zip(said, wanted, strict=True)):
        _log.warning(
            "the draft service searches to depth %d and width %d, in contexts of %d tokens, and this engine was to "
            "have %d, %d and %d: what is beyond is decoded without drafts", *said, *wanted,
        )  # fmt: skip


def with_drafting(samples: CostSamples, limits: Limits, welcome: Welcome, round_trip_s: float) -> CostSamples:
    """Return the samples with a service's drafting times. The round trip is added to the catch-up time, of which a
    round has exactly one."""
    if not welcome.level_s or not welcome.catchup_s:
        return guess_times(samples, limits)
    rows = sorted({rows for rows, _ in welcome.level_s})
    levels = {(n, width): _level_s(welcome, n, width) for n in rows for width in sorted({1, limits.max_width})}
    fed = {tokens: seconds + round_trip_s for tokens, seconds in welcome.catchup_s.items()}
    return replace(samples, catchup_s=fed, draft_level_s=levels)


def guess_times(samples: CostSamples, limits: Limits) -> CostSamples:
    """Return the samples with guessed drafting times."""
    grid = CostGrid(samples, limits)

    def share(tokens: int, rows: int) -> float:
        return GUESSED_SHARE * grid.verify_s(min(tokens, limits.max_tokens), rows, samples.context * grid.groups(rows))

    levels = {(n, w): share(n * w, n) for n in grid.row_buckets for w in sorted({1, limits.max_width})}
    fed = {tokens: GUESSED_ROUND_TRIP_S + share(tokens, 1) for tokens in limits.token_edges}
    return replace(samples, catchup_s=fed, draft_level_s=levels)


def round_trip_s(
    drafter: ServiceDrafter, limits: Limits, served_s: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measure the seconds of a round beyond those that the service works: the least of TRIALS rounds.

    Returns GUESSED_ROUND_TRIP_S if no round came back. No request may run yet.
    """
    times = []
    for length in range(TRIALS):
        draft = draft_plan(np.ones(1, np.int32), length, depth=1, width=1)
        plan = decode_plan(limits, 1, length, replace(draft, due_s=np.full(1, np.inf)))
        began = clock()
        candidates = drafter.propose(plan)
        if candidates.log_f.size and candidates.log_f[0, 0] > -np.inf:
            times.append(clock() - began)
    drafter.ended(np.zeros(1, np.int32))
    drafter.count_anew()  # the trial rounds do not belong in the statistics
    return max(min(times) - served_s, 0.0) if times else GUESSED_ROUND_TRIP_S


def _level_s(welcome: Welcome, rows: int, width: int) -> float:
    """Return the seconds of a level in the next larger search that the service timed, or in its largest."""
    held = sorted({n for n, _ in welcome.level_s})
    n = held[min(bisect_left(held, rows), len(held) - 1)]
    widths = sorted(w for m, w in welcome.level_s if m == n)
    return welcome.level_s[n, widths[min(bisect_left(widths, width), len(widths) - 1)]]
