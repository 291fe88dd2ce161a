"""gRPC, imported so that the thread that waits for a message is the one that reads its socket.

With its event engine, which later versions have on, each message passes through three threads more on either side.
What is imported first decides for the whole process; `GRPC_EXPERIMENTS`, where it is set, decides before that.
"""

from __future__ import annotations

import os
from importlib.metadata import version

VARIABLE = "GRPC_EXPERIMENTS"
DIRECT = "-event_engine_client,-event_engine_listener"
KNOWN_TO = (1, 85)
"""The last version that is known to have these two; one that has not would complain of them."""


def _is_known(grpc_version: str) -> bool:
    """Whether a version of gRPC has the experiments of DIRECT."""
    return tuple(int(part) for part in grpc_version.split(".")[:2]) <= KNOWN_TO


_sets = VARIABLE not in os.environ and _is_known(version("grpcio"))
if _sets:
    os.environ[VARIABLE] = DIRECT
try:
    import grpc
finally:
    if _sets:
        del os.environ[VARIABLE]  # which processes that are started from here would inherit

__all__ = ["grpc"]
