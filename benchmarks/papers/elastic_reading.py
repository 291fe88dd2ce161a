"""What Nightjar's table 6 states, read from benchmarks/nightjar/elastic.py. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from adaserve_jax.report.document import Table
from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import read_json

EXPANSION_S, CONTRACTION_S, DISPATCH_S = 0.1439, 0.0119, 21.9e-6
"""The paper's, of a 32B target on two L20 GPUs."""
ELASTIC_CLAIMS = (
    Claim("expansion over contraction", "expansion over contraction", "at least", 1.0, EXPANSION_S / CONTRACTION_S),
    Claim("expansion", "expansion, s", "at most", EXPANSION_S, EXPANSION_S, "s"),
    Claim("contraction", "contraction, s", "at most", CONTRACTION_S, CONTRACTION_S, "s"),
    Claim("dispatch of the draft's reload, over a whole contraction", "dispatch share", "at most", 0.1,
          DISPATCH_S / CONTRACTION_S, "share"),
)  # fmt: skip


def swaps(step: str) -> Callable[[Folders], Found]:
    """Medians over rounds."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "elastic.json")
        seconds = result["swaps"]["seconds"]

        def middle(*names: str) -> float:
            return median(map(sum, zip(*(seconds[name] for name in names), strict=True)))

        expansion, contraction, dispatch = middle("expand"), middle("move", "contract"), middle("contract")
        values = {
            "expansion over contraction": expansion / contraction,
            "expansion, s": expansion,
            "contraction, s": contraction,
            "dispatch share": dispatch / contraction,
        }
        rows = tuple(
            (name, f"{paper * 1e3:.3g}", f"{ours * 1e3:.3g}")
            for name, paper, ours in (
                ("expansion", EXPANSION_S, expansion), ("contraction", CONTRACTION_S, contraction),
                ("dispatch of the reload", DISPATCH_S, dispatch),
            )
        )  # fmt: skip
        caption = f"{result['params']['target'] / 1e6:.1f}M parameters, {result['dtype']}, {result['device']}."
        shown = Table("swaps", "Operations", caption, ("operation", "paper, ms", "here, ms"), rows, frozenset({1, 2}))
        return Found(values, (shown,), {name: str(result[name]) for name in ("commit", "machine", "device")})

    return read
