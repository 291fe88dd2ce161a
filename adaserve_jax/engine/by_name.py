"""What is imported late is found by its name, so that who may need it imports neither jax nor what is not installed.

Imports nothing of the project but errors, while a program runs; what is loaded is typed as itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from adaserve_jax.errors import ConfigError

if TYPE_CHECKING:
    from adaserve_jax.engine.llm import LLM
    from adaserve_jax.engine.thread_engine import LocalEngine
    from adaserve_jax.star.client.channel import GrpcTransport

LLM_CLASS = "adaserve_jax.engine.llm:LLM"
LOCAL_ENGINE = "adaserve_jax.engine.thread_engine:LocalEngine"
"""The engine in a thread, which imports jax."""
GRPC_TRANSPORT = "adaserve_jax.star.client.channel:GrpcTransport"
"""What streams to draft services, which imports gRPC."""


def load(path: str) -> Any:
    """Import "module:callable". Raises ConfigError when it is not of that form."""
    module, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"what is loaded by name must be 'module:callable', got {path!r}")
    return getattr(importlib.import_module(module), name)


def llm_class() -> type[LLM]:
    return cast("type[LLM]", load(LLM_CLASS))


def local_engine() -> type[LocalEngine]:
    return cast("type[LocalEngine]", load(LOCAL_ENGINE))


def grpc_transport() -> type[GrpcTransport]:
    return cast("type[GrpcTransport]", load(GRPC_TRANSPORT))
