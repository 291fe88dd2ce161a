"""What an engine that asks draft services has in the place of a draft: the drafter, and what drafting will take.

The services say what their device takes; the way there is measured with a session that is thrown away. Where none
answers, the engine starts all the same, on a guess, which gives way to what the first that does answer says.
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
from adaserve_jax.engine.by_name import grpc_transport
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
"""Rounds by which the way to a service and back is measured."""
GUESSED_SHARE = 0.125
"""Of the target's time for as many tokens that a level of a draft nobody has timed is taken to cost: what a draft of an
eighth of its target costs."""
GUESSED_WAY_S = 0.002
"""Seconds there and back then: about those of two hosts in one room."""
_log = logging.getLogger(__name__)


class ServiceDrafter(Drafter, DraftSessions, Protocol):
    """What an engine needs of `star.remote.RemoteDrafter`."""

    def connect(self, timeout_s: float) -> Welcome | None: ...

    def stats(self) -> DrafterStats: ...

    def count_anew(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Drafting:
    """The drafter of an engine, ready or connecting. samples: with the times of drafting. guessed: whether those are a
    guess, since no service has answered yet."""

    drafter: ServiceDrafter
    samples: CostSamples
    guessed: bool = False


def check_packages() -> None:
    """Raise ConfigError where what speaks to draft services is not installed."""
    for package, module in (("grpc", "grpc"), ("protobuf", "google.protobuf")):
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ConfigError(f"drafter needs {package}, which is missing: pip install 'adaserve-jax[star]'")


def check_files(config: DrafterConfig) -> None:
    """Raise ConfigError where a file that `config` names cannot be used, before minutes of compiling."""
    grpc_transport()(config.addresses[0], config)


def connect_drafter(
    config: DrafterConfig, chances: ChanceTable, tokenizer: Tokenizer, samples: CostSamples, limits: Limits,
    vocab_size: int,
) -> Drafting:  # fmt: skip
    """Greet the services, and wait for a first one to answer, not long; the others, or all, connect meanwhile. chances,
    samples: of the target, which has so many token ids."""
    hello = hello_of(config, chances, tokenizer, samples, limits)
    drafter = build(config, chances, hello, limits.max_requests, vocab_size)
    try:
        return ready(drafter, samples, limits)
    except BaseException:
        drafter.close()
        raise


def build(config: DrafterConfig, chances: ChanceTable, hello: Hello, max_rows: int, vocab_size: int) -> ServiceDrafter:
    """The drafter; its connections begin. `check_packages` has found what it needs."""
    from adaserve_jax.star.client.drafter import RemoteDrafter

    connects = grpc_transport()
    transports = [connects(address, config) for address in config.addresses]
    return RemoteDrafter(transports, config, hello=hello, table=chances, max_rows=max_rows, vocabulary=vocab_size)


def hello_of(
    config: DrafterConfig, chances: ChanceTable, tokenizer: Tokenizer, samples: CostSamples, limits: Limits
) -> Hello:
    """What this process says of itself; times are those of one request."""
    grid = CostGrid(samples, limits)
    return Hello(
        target_id=f"{os.getpid()}-{secrets.token_hex(8)}",
        vocabulary_hash=tokenizer.vocabulary_hash,
        cells_hash=cells_hash(chances),
        draft_version=config.drafter_version,
        verify_s=grid.verify_s(1 + limits.max_depth, 1, samples.context),
        plain_s=grid.verify_s(1, 1, samples.context),
    )


def ready(drafter: ServiceDrafter, samples: CostSamples, limits: Limits, connect_s: float = CONNECT_S) -> Drafting:
    """Wait for a service, at most so long, and measure the way to it. What is planned is what this engine was
    configured for, whatever services search: each is asked for no more than it searches, and they come and go."""
    welcome = drafter.connect(connect_s)
    if welcome is None:
        services = drafter.stats().services.items()
        states = "; ".join(f"{address}: {state.reason or state.breaker}" for address, state in services)
        _log.warning(
            "no draft service answered within %g s (%s): serving without drafts, and connecting meanwhile", connect_s,
            states,
        )  # fmt: skip
        return Drafting(drafter, guessed(samples, limits), guessed=True)
    _tell_of_less(welcome, limits)
    way_s = round_trip_s(drafter, limits, _served(welcome))
    return Drafting(drafter, with_drafting(samples, limits, welcome, way_s))


def answered(found: Drafting, limits: Limits) -> Drafting | None:
    """With the times that the service says, once a first one has answered an engine that started on a guess; None until
    then. Returns at once. The way to it stays a guess, which steps correct: requests run, so it cannot be measured."""
    welcome = found.drafter.connect(0.0)
    if welcome is None:
        return None
    _tell_of_less(welcome, limits)
    _log.info("a draft service has answered: drafting is planned by the times that it measured")
    return Drafting(found.drafter, with_drafting(found.samples, limits, welcome, GUESSED_WAY_S))


def _tell_of_less(welcome: Welcome, limits: Limits) -> None:
    """Warn where a service searches less than this engine was to have."""
    said = (welcome.max_depth, welcome.max_width, welcome.max_context)
    if any(
        has < wanted for has, wanted in zip(said, (limits.max_depth, limits.max_width, limits.max_context), strict=True)
    ):
        _log.warning(
            "the draft service searches to depth %d and width %d, in contexts of %d tokens, and this engine was to "
            "have %d, %d and %d: what is beyond is decoded without drafts", *said, limits.max_depth, limits.max_width,
            limits.max_context,
        )  # fmt: skip


def with_drafting(samples: CostSamples, limits: Limits, welcome: Welcome, way_s: float) -> CostSamples:
    """The samples with what the service says that drafting takes. way_s: seconds there and back, which come with what a
    draft is fed: once a round."""
    if not welcome.level_s or not welcome.catchup_s:
        return guessed(samples, limits)
    rows = sorted({rows for rows, _ in welcome.level_s})
    levels = {(n, width): _level_s(welcome, n, width) for n in rows for width in sorted({1, limits.max_width})}
    fed = {tokens: seconds + way_s for tokens, seconds in welcome.catchup_s.items()}
    return replace(samples, catchup_s=fed, draft_level_s=levels)


def guessed(samples: CostSamples, limits: Limits) -> CostSamples:
    """The samples with a guess of what drafting takes."""
    grid = CostGrid(samples, limits)

    def share(tokens: int, rows: int) -> float:
        return GUESSED_SHARE * grid.verify_s(min(tokens, limits.max_tokens), rows, samples.context * grid.groups(rows))

    levels = {(n, w): share(n * w, n) for n in grid.row_buckets for w in sorted({1, limits.max_width})}
    fed = {tokens: GUESSED_WAY_S + share(tokens, 1) for tokens in limits.token_edges}
    return replace(samples, catchup_s=fed, draft_level_s=levels)


def round_trip_s(
    drafter: ServiceDrafter, limits: Limits, served_s: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of a round beyond those that the service works, the least of some; GUESSED_WAY_S where none came back.
    Nothing may run on the engine yet."""
    times = []
    for length in range(TRIALS):
        draft = draft_plan(np.ones(1, np.int32), length, depth=1, width=1)
        plan = decode_plan(limits, 1, length, replace(draft, due_s=np.full(1, np.inf)))
        began = clock()
        candidates = drafter.propose(plan)
        if candidates.log_f.size and candidates.log_f[0, 0] > -np.inf:
            times.append(clock() - began)
    drafter.ended(np.zeros(1, np.int32))
    drafter.count_anew()  # these served nobody
    return max(min(times) - served_s, 0.0) if times else GUESSED_WAY_S


def _served(welcome: Welcome) -> float:
    """Seconds that the service works for one level of one row."""
    fed = welcome.catchup_s[min(welcome.catchup_s)] if welcome.catchup_s else 0.0
    return fed + (_level_s(welcome, 1, 1) if welcome.level_s else 0.0)


def _level_s(welcome: Welcome, rows: int, width: int) -> float:
    """Of the next larger search that the service timed, or else of its largest."""
    held = sorted({n for n, _ in welcome.level_s})
    n = held[min(bisect_left(held, rows), len(held) - 1)]
    widths = sorted(w for m, w in welcome.level_s if m == n)
    return welcome.level_s[n, widths[min(bisect_left(widths, width), len(widths) - 1)]]
