"""What is said of a cluster, whatever runs it: on the terminal and at the head of state.json. Starts nothing."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.run_folder import RunFolder


class Orchestrator(Protocol):
    """A cluster and what keeps it running. phase: starting, ready or stopping. url: of its router. started_s: Unix
    time; ready_s: seconds that the start took, None before it is over."""

    plan: ClusterPlan
    folder: RunFolder
    phase: str
    url: str
    started_s: float
    ready_s: float | None


def announce(cluster: Orchestrator, by: str = "") -> None:
    """Print that it is ready. by: what runs it, where that is not this program."""
    assert cluster.ready_s is not None, "a cluster that is ready knows how long that took"
    print(
        f"adaserve cluster: {cluster.plan.targets} targets and {cluster.plan.drafts} drafts serve on {cluster.url} "
        f"after {cluster.ready_s:.1f} s ({by and f'{by}, '}state: {cluster.folder.state_file})",
        flush=True,
    )


def announce_end() -> None:
    print("adaserve cluster: stops", file=sys.stderr, flush=True)


def state_head(cluster: Orchestrator, orchestrator: str) -> dict[str, Any]:
    """What state.json says of the cluster as a whole; no secrets."""
    return {
        "orchestrator": orchestrator, "pid": os.getpid(), "phase": cluster.phase, "url": cluster.url,
        "started_unix_s": cluster.started_s, "ready_after_s": cluster.ready_s,
        "token_file": str(cluster.folder.token_file), "tls_cert": cluster.plan.router.tls_cert,
    }  # fmt: skip
