"""Writes the table of policies in docs/policies.md, between its policies markers, from the code. Imports no jax."""

from __future__ import annotations

from pathlib import Path

from adaserve_jax.scheduler.policies import POLICIES, SELECTION_RULES, Policy
from benchmarks.markdown import between, head, line

PAGE = Path(__file__).resolve().parent.parent / "docs" / "policies.md"
COLUMNS = ("policy", "what it is", "nodes to verify", "requests by", "draft", "its memory")
NEEDS = {"horizon": "need over a horizon", "step": "need of one step", "code": "need of one step"}


def nodes(policy: Policy) -> str:
    if not policy.uses_draft:
        return "-"
    assert not callable(policy.selector), "functions are for policies of files"
    phase = f"{NEEDS[policy.need]}, {policy.slo_order}"
    return SELECTION_RULES[policy.selector].format(need=phase)


def memory(policy: Policy) -> str:
    """Return whether the draft's memory becomes KV pages when they are short."""
    if not policy.elastic:
        return "fixed" if policy.uses_draft else "-"
    return "pages where worth more" if policy.weighs_pages else "pages while off"


def policies_table() -> str:
    """Return a table with a row per policy: its parts, as the code composes them."""
    rows = [
        line(
            f"`{name}`", policy.about, nodes(policy), policy.ordering,
            "needed" if policy.needs_draft else "used" if policy.uses_draft else "-", memory(policy),
        )
        for name, policy in POLICIES.items()
    ]  # fmt: skip
    return "\n".join([head(*COLUMNS), *rows])


def updated(page: str) -> str:
    """Return the page with its table made anew."""
    return between(page, "policies", f"\n{policies_table()}\n", PAGE.name)


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()
