"""What is imported late is found by its name, so that who may need it imports neither jax nor what is not installed.

Imports nothing of the project but errors.
"""

from __future__ import annotations

import importlib
from typing import Any

from adaserve_jax.errors import ConfigError

LOCAL_ENGINE = "adaserve_jax.engine.local:LocalEngine"
"""The engine in a thread, which imports jax."""
GRPC_TRANSPORT = "adaserve_jax.star.channel:GrpcTransport"
"""What streams to draft services, which imports gRPC."""


def load(path: str) -> Any:
    """Import "module:callable". Raises ConfigError when it is not of that form."""
    module, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"what is loaded by name must be 'module:callable', got {path!r}")
    return getattr(importlib.import_module(module), name)
