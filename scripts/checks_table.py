"""Writes the table of docs/models.md that says what the tests check of each family, from the cases of the tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.markdown import between, head, line
from tests.engine import test_families, test_quantized_checkpoints
from tests.models.quantized_checkpoints import FORMATS
from tests.models.torch_checkpoints import FAMILIES
from tests.runtime import mesh_process, test_adapters

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
COLUMNS = (
    "`architectures`", "checkpoints", "formats", "`--tp`, logits", "`--tp`, texts", "`--tp`, quantised",
    "`--tp`, formats", "LoRA", "`--tp`, LoRA",
)  # fmt: skip


def checks_table() -> str:
    """Return the table, a row for each class of transformers."""
    return "\n".join([head(*COLUMNS), *(_row(name) for name in dict.fromkeys(name for name, _ in FAMILIES.values()))])


def updated(page: str) -> str:
    """Return the page with its table made anew."""
    return between(page, "checks", f"\n\n{checks_table()}\n\n", PAGE.name)


def _row(name: str) -> str:
    def of_class(family: str) -> bool:
        return FAMILIES[family][0] == name

    formats = [each for each, recipe in FORMATS.items() if any(map(of_class, recipe.families))]
    divided = {case: (made, kind) for case, (made, _, kind, _) in mesh_process.CASES.items()}
    plain = {made: family for made, family in mesh_process.WRITTEN.items() if of_class(family)}
    twins = [made for made, family in test_quantized_checkpoints.CASES if of_class(family)]
    adapted = [case for case in test_adapters.CASES if of_class(case.split("-")[0])]
    return line(
        f"`{name}ForCausalLM`",
        str(sum(map(of_class, FAMILIES))),
        ", ".join(f"`{each}`" for each in formats),
        _yes(made in plain for made, kind in divided.values() if kind == "none"),
        _yes(map(of_class, test_families.DIVIDED)),
        ", ".join(sorted({kind for made, kind in divided.values() if kind != "none" and made in plain})),
        ", ".join(f"`{made}`" for made in twins),
        _yes(adapted),
        _yes(made in plain for case, (made, _) in divided.items() if case.startswith("adapted")),
    )


def _yes(checked: Iterable[object]) -> str:
    return "yes" if any(checked) else ""


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()
