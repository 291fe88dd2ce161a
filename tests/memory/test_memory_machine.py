"""The state machine of pool and cache: 5,000 steps in every run, 200,000 in a slow one."""

import pytest
from hypothesis import HealthCheck, settings

from tests.memory.model import MemoryMachine


class TestMemory(MemoryMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestMemoryLong(MemoryMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
    )
