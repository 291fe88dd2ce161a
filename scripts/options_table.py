"""Writes the table of engine options in docs/python-api.md, between its options markers, from the code. No jax."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from adaserve_jax.config import FIELD_HELP, EngineConfig

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "python-api.md"
BEGIN, END = "<!-- options -->", "<!-- /options -->"


def options_table() -> str:
    """One row per field of EngineConfig: name, default, help."""
    rows = [f"| `{field.name}` | `{field.default!r}` | {FIELD_HELP[field.name]} |" for field in fields(EngineConfig)]
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])


def main() -> None:
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    GUIDE.write_text(f"{before}{BEGIN}\n{options_table()}\n{END}{after}")


if __name__ == "__main__":
    main()
