"""What is loaded by name is there, whatever has been renamed since."""

from __future__ import annotations

import pytest

from adaserve_jax.engine import by_name
from adaserve_jax.engine.llm import LLM
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.client.channel import GrpcTransport


def test_every_name_is_that_of_what_its_function_says():
    found = {by_name.load(value) for name, value in vars(by_name).items() if name.isupper() and isinstance(value, str)}
    assert found == {LLM, LocalEngine, GrpcTransport}
    assert (by_name.llm_class(), by_name.local_engine()) == (LLM, LocalEngine)
    assert by_name.grpc_transport() is GrpcTransport


def test_a_name_without_its_module_is_refused():
    with pytest.raises(ConfigError, match="what is loaded by name must be 'module:callable', got 'LocalEngine'"):
        by_name.load("LocalEngine")
