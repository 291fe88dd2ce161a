"""StarSD's table 1 and figures 4 to 6: all wait for a draft that serves several targets."""

from __future__ import annotations

from papers.entry import Entry, NotYet

PAPER = "StarSD"
SERVICE = NotYet("a draft service that several targets share, which the engine does not have")

ENTRIES = tuple(
    Entry(name, PAPER, item, shows, "Nothing yet.", {"cpu": SERVICE, "gpu": SERVICE})
    for name, item, shows in (
        (
            "starsd-table-1", "table 1",
            "Throughput, waiting and idle times, rounds per second and load of one draft for one to six targets.",
        ),
        (
            "starsd-4", "figure 4",
            "What it costs that draft and target are apart: throughput and rounds per second over a benchmark, and the "
            "time that messages take.",
        ),
        ("starsd-5", "figure 5", "Rounds per second of the draft and of a target, and the draft's load, by targets."),
        (
            "starsd-6", "figure 6",
            "Time of a draft token by how long the draft was idle before, and after warming it up.",
        ),
    )
)  # fmt: skip
