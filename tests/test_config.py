"""The configuration refuses wrong types and values where it is made, not after minutes of loading."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from adaserve_jax import EngineConfig
from adaserve_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("target", (None, 5), "a name or a path"),
        ("draft", (5,), "a name or a path"),
        ("compile_cache", (5,), "a name or a path"),
        ("policy", (None,), "the name of a policy"),
        ("deterministic", ("yes", 1), "True or False"),
        ("eq8_eq9", (None,), "True or False"),
        ("max_requests", (-1, 2.5, True, "3"), "an integer >= 0"),
        ("max_context", (7, 1), "0 or an integer >= 8"),
        ("max_waiting", (0, "x"), "an integer >= 1"),
        ("num_pages", (-1, 1.0), "an integer >= 0"),
        ("seed", (-1, 0.5, None), "an integer >= 0"),
        ("page_size", (0, 7, 16.0), "(an integer >= 1|one of 8, 16, 32, 64, 128)"),
        ("max_depth", (0, 17, 2.5, "3"), "an integer from 1 to 16"),
        ("max_width", (0, 17), "an integer from 1 to 16"),
        ("token_edges", (5, (4, 4), (0,), (8, 4), ("a",)), "increasing integers >= 1"),
        ("row_edges", ((2, 1),), "increasing integers >= 1"),
        ("dtype", ("f64", 3), "one of auto, f32, bf16"),
        ("tp", (0, "2"), "an integer >= 1"),
        ("num_processes", (0, 2.0), "an integer >= 1"),
        ("process_id", (-1,), "an integer >= 0"),
        ("process_id", (1,), r"below num_processes \(1\)"),
        ("coordinator", (7, "host:7000"), "(a name or a path|none while num_processes is 1)"),
    ],
)
def test_wrong_values(field: str, values: tuple[object, ...], expected: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{field} must be .*{expected}, got "):
            EngineConfig(**{field: value})


@pytest.mark.parametrize("address", [None, "host", "host:", ":7000", "host:port", "host:0", "host:65535", "host:70000"])
def test_several_processes_need_an_address_with_room_for_two_ports(address: str | None) -> None:
    with pytest.raises(ConfigError, match="coordinator must be host:port of process 0 where num_processes > 1, got "):
        EngineConfig(num_processes=2, coordinator=address)
    assert EngineConfig(num_processes=2, process_id=1, coordinator="[::1]:7000").process_id == 1


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown option 'tagret'; known options are attention, calibrate, "):
        EngineConfig.from_dict({"tagret": "demo"})


def test_paths_become_text_and_lists_tuples() -> None:
    config = EngineConfig(target=Path("a/b"), draft=None, token_edges=[4, 8])  # type: ignore[arg-type]
    assert (config.target, config.draft, config.token_edges) == ("a/b", None, (4, 8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.target = "other"  # type: ignore[misc]
