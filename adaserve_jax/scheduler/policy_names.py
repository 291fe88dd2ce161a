"""From names to policies: those of POLICIES, ablations, files, and names that stand for several."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.ablations import ABLATIONS, HALVES, LADDER, ORDERS
from adaserve_jax.scheduler.policies import POLICIES, Policy
from adaserve_jax.scheduler.policy_files import names_a_file, policy_from_file

GROUPS = {"ladder": LADDER, "halves": HALVES, "orders": ORDERS}
"""Names that commands take in place of several."""


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """`names` with those of a group in the place of the group's name, each once."""
    return tuple(dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,))))


def policy_of(config: EngineConfig) -> Policy:
    """The policy of a configuration, before anything is loaded. Raises ConfigError as `find_policy` does."""
    return find_policy(config.policy, config.max_depth if config.speculates else 0)[0]


def find_policy(name: str, max_depth: int) -> tuple[Policy, int]:
    """The policy called `name` and its parameter; needs nothing loaded. max_depth: deepest draft, 0 without one.

    Raises ConfigError for an unknown name, one that needs a draft, or a deeper one, and for a file as
    `policy_from_file` does.
    """
    family, colon, parameter = name.partition(":")
    whole = policy_from_file(name) if names_a_file(name) else POLICIES.get(name) or ABLATIONS.get(name)
    if whole is not None and f"{family}:<k>" not in POLICIES:
        if whole.needs_draft and not max_depth:
            raise ConfigError(f"policy {name} needs a draft, but there is none; load one, or choose ar")
        return whole, 0
    if not colon or f"{family}:<k>" not in POLICIES:
        known = ", ".join((*POLICIES, *ABLATIONS))
        raise ConfigError(f"unknown policy {name!r}; known policies are {known}, and those of files: FILE.py:NAME")
    if not (parameter.isascii() and parameter.isdecimal() and int(parameter) >= 1):
        raise ConfigError(f"policy {family}:<k> needs an integer k of at least 1, got {name!r}; for example {family}:4")
    depth = int(parameter)
    if depth > max_depth:
        has = f"max_depth is {max_depth}" if max_depth else "there is no draft"
        raise ConfigError(
            f"policy {name} needs a draft and max_depth of at least {depth}, but {has}; load a draft and raise "
            "max_depth, or choose a smaller k"
        )
    return POLICIES[f"{family}:<k>"], depth
