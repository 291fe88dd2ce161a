"""Which draft services an engine asks: checked where it is said, before anything is loaded or connected."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaserve_jax.drafter_config import DrafterConfig, DrafterOptions
from adaserve_jax.errors import ConfigError

ONE = ("grpc://127.0.0.1:7070",)


def test_addresses_are_those_of_the_services_in_order() -> None:
    config = DrafterConfig(("grpc://draft.example:7070", "grpc://[::1]:7071"), drafter_deadline_ms=250)
    assert config.addresses == ("draft.example:7070", "[::1]:7071")
    assert config.deadline_s == 0.25
    assert DrafterConfig(drafter=list(ONE)).drafter == ONE


@pytest.mark.parametrize(
    "service",
    ["127.0.0.1:7070", "http://a:1", "grpc://a", "grpc://a:", "grpc://:7070", "grpc://a:0", "grpc://a:70000", "grpc://a:b",
     "grpc://a:1/x", "grpc://me@a:1", "grpc://a:1?b", "grpc://a b:1", "grpc://[::1:7070", 7070, None],
)  # fmt: skip
def test_what_is_not_an_address_is_refused(service: object) -> None:
    with pytest.raises(ConfigError, match=r"^drafter must be one or more of grpc://host:port, got "):
        DrafterConfig((*ONE, service))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("drafter", ((), "grpc://a:1", None), "one or more of grpc://host:port"),
        ("drafter", ((*ONE, *ONE),), "of different addresses"),
        ("drafter_deadline_ms", (0, -1.0, float("nan"), float("inf"), "5", True), "a finite number above 0"),
        ("drafter_version", (None, 3), "the version of a draft, or empty for any"),
        ("drafter_token_file", (3,), "a path"),
        ("drafter_key", ("key.pem",), "given together with drafter_cert"),
    ],
)
def test_wrong_values(name: str, values: tuple[object, ...], expected: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{name} must be .*{expected}, got "):
            DrafterConfig(**{"drafter": ONE, name: value})  # type: ignore[arg-type]


def test_a_certificate_of_its_own_needs_the_authority() -> None:
    with pytest.raises(ConfigError, match=r"^drafter_ca must be given where drafter_cert is, got None$"):
        DrafterConfig(ONE, drafter_cert="cert.pem", drafter_key="key.pem")
    config = DrafterConfig(ONE, drafter_ca=Path("ca.pem"), drafter_cert="cert.pem", drafter_key="key.pem")  # type: ignore[arg-type]
    assert config.drafter_ca == "ca.pem"


def test_options_without_a_service_choose_none_and_name_what_has_no_effect() -> None:
    assert DrafterOptions().chosen() is None
    assert DrafterOptions().unused() == []
    kept = DrafterOptions(drafter_deadline_ms=50.0)
    assert kept.chosen() is None and kept.unused() == ["drafter_deadline_ms"]
    chosen = DrafterOptions(ONE, drafter_deadline_ms=50.0)
    assert chosen.unused() == []
    assert chosen.chosen() == DrafterConfig(ONE, drafter_deadline_ms=50.0)
    assert type(chosen.chosen()) is DrafterConfig


def test_unknown_keys_are_named() -> None:
    with pytest.raises(
        ConfigError, match="unknown option 'drafters', did you mean drafter; known options are drafter, "
    ):
        DrafterConfig(drafters=ONE)
