"""A pytest plugin: hypothesis reports the first example that fails, without looking for a smaller one."""

from __future__ import annotations

from hypothesis import Phase, settings


def pytest_configure() -> None:
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    settings.register_profile("no-shrinking", settings(settings.default, phases=phases))
    settings.load_profile("no-shrinking")
