"""benchmarks/program.py: how benchmarks run."""

from __future__ import annotations

import sys

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.results import provenance
from benchmarks import program


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    provenance.source_commit.cache_clear()
    yield
    provenance.source_commit.cache_clear()


def test_the_commit_is_that_of_the_source_when_the_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def main() -> None:
        monkeypatch.setattr(provenance, "commit_of", lambda _: pytest.fail("asked after the run"))
        told.append(provenance.source_commit())

    monkeypatch.setattr(provenance, "_git", lambda *_: "a file of the checkout")
    monkeypatch.setattr(provenance, "commit_of", lambda _: "abc")
    with pytest.raises(SystemExit, match=r"^0$"):
        program.run(main)
    assert told == ["abc"]


def test_an_error_is_one_line() -> None:
    def main() -> None:
        raise ConfigError("--rates must be above 0")

    with pytest.raises(SystemExit, match=r"^error: --rates must be above 0$"):
        program.run(main)
