"""Online Speculative Decoding's tables 1 to 3 and figures 3 to 6: most wait for a draft that learns while it serves."""

from __future__ import annotations

from collections.abc import Callable

from papers.entry import Claim, Entry, Folders, Form, Found, NotYet, Step
from papers.reading import figure, read_json, series

PAPER = "OSD"
LEARNING = NotYet("a draft that is distilled while it serves, which the engine does not have")
ROUTING = NotYet("drafts that are distilled while they serve and a router between them, which the engine does not have")
SPEEDUPS = {0.5: (1.28, 0.95), 0.6: (1.44, 1.17), 0.7: (1.65, 1.3), 0.8: (2.01, 1.68), 0.9: (2.63, 2.55)}
"""The paper's, by acceptance: of a 1.1B draft for 33B and a 160M one for 7B."""
MACHINE = "qwen-32b"
"""Of the packaged machines the one whose draft costs the smaller share."""


def _speedups(step: str) -> Callable[[Folders], Found]:
    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "speedup.json")
        rows = result["rows"]
        values = {f"{row['machine']} at {row['acceptance']:g}": row["times"] for row in rows}
        machines = dict.fromkeys(row["machine"] for row in rows)
        curves = {name: {r["acceptance"]: r["times"] for r in rows if r["machine"] == name} for name in machines}
        curves |= {
            f"{name}, by the formula": {r["acceptance"]: r["formula_times"] for r in rows if r["machine"] == name}
            for name in machines
        }
        shown = figure(
            "speedup", "Speedup by acceptance", "Simulated, one request at a time.", "acceptance of a draft token",
            [("speedup", "times plain decoding", series(curves))],
        )  # fmt: skip
        return Found(values, (shown,), {name: result[name] for name in ("commit", "machine")})

    return read


SPEEDUP = Step(
    "acceptance-speedup", ("python", "benchmarks/acceptance_speedup.py", "--out", "{here}/speedup.json"), 0.5
)
SPEEDUP_CLAIMS = tuple(
    Claim(f"speedup at an acceptance of {acceptance:g}", f"{MACHINE} at {acceptance:g}", "at least", 1.0, large)
    for acceptance, (large, _) in SPEEDUPS.items()
)

ENTRIES = (
    Entry(
        "osd-table-1", PAPER, "table 1",
        "Acceptance of drafts distilled beforehand on four data sets, by what they are taught with.",
        "Nothing yet.", {"cpu": LEARNING, "gpu": LEARNING},
    ),
    Entry(
        "osd-table-2", PAPER, "table 2",
        "Milliseconds per token of one request, by how often the draft is right, for two pairs of models.",
        "Five drafted tokens, on a machine whose draft step costs a seventh of a verification (the larger pair of the "
        "paper: a twelfth), beside the formula of independent acceptances.",
        {
            "cpu": Form(
                (SPEEDUP,), _speedups(SPEEDUP.name), SPEEDUP_CLAIMS, "one request at a time", "speedup.json",
                "Simulated; the paper's numbers are those of its larger pair.",
            ),
            "gpu": NotYet("drafts of given acceptances for one target, which distilling while serving would make"),
        },
    ),
    Entry(
        "osd-table-3", PAPER, "table 3",
        "Milliseconds per token with the distilled draft, on five data sets.",
        "Nothing yet.", {"cpu": LEARNING, "gpu": LEARNING},
    ),
    Entry(
        "osd-3", PAPER, "figure 3",
        "Acceptance over the requests served, while the draft learns from them, on four data sets.",
        "Nothing yet.", {"cpu": LEARNING, "gpu": LEARNING},
    ),
    Entry(
        "osd-4", PAPER, "figure 4",
        "The same when the data set changes every 2,000 requests.",
        "Nothing yet.", {"cpu": LEARNING, "gpu": LEARNING},
    ),
    Entry(
        "osd-5", PAPER, "figure 5",
        "The same on conversations in five languages and on five topics, each with a draft of its own.",
        "Nothing yet.", {"cpu": ROUTING, "gpu": ROUTING},
    ),
    Entry(
        "osd-6", PAPER, "figure 6",
        "One draft for all topics beside one for each.",
        "Nothing yet.", {"cpu": ROUTING, "gpu": ROUTING},
    ),
)  # fmt: skip
