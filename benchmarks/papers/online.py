"""Online Speculative Decoding's tables 1 to 4 and figures 3 to 6: what they show, and how they are measured here."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers.entry import Claim, Entry, Folders, Form, Found, NotYet, Step
from benchmarks.papers.learning_reading import (
    JSD,
    MEDUSA_CLAIMS,
    MEDUSA_SPEEDUPS,
    MIXED,
    NARROW_CLAIMS,
    OFFLINE_CLAIMS,
    REVERSE,
    ROUTED_CLAIMS,
    SHIFT_CLAIMS,
    SPEED_CLAIMS,
    STUDENT,
    TEACHER,
    TOPIC_CLAIMS,
    latency,
    medusa,
    narrow,
    offline,
    routed,
    shift,
    topics,
)
from benchmarks.papers.reading import figure, read_json, series

PAPER = "OSD"
SIMULATED = NotYet("training, which the simulator cannot do; --size engine trains the embedded draft on a CPU")
LARGER = NotYet(
    "a trained pair large enough for a GPU: the embedded one is too small, and a target that is grown from it gives "
    "the same answers"
)
PAIR = "The embedded pair on a CPU, the draft's top layer replaced by random weights."
NEVER_SERVED = "Acceptance is measured on texts that were never served, over the whole vocabulary."
JUDGED = f"{PAIR} {NEVER_SERVED}"
MIXED_JUDGED = f"The embedded pair on a CPU, the draft without the layers above its first. {NEVER_SERVED}"
LONGER = "Online learning goes over its texts about four times, twice as often as the draft distilled offline."
SPEEDUPS = {0.5: 1.28, 0.6: 1.44, 0.7: 1.65, 0.8: 2.01, 0.9: 2.63}
"""The paper's, by acceptance: of a 1.1B draft for 33B."""
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
    "acceptance-speedup",
    ("python", "-m", "benchmarks.adaserve.acceptance_speedup", "--out", "{here}/speedup.json"),
    0.5,
)
SPEEDUP_CLAIMS = tuple(
    Claim(f"speedup at an acceptance of {acceptance:g}", f"{MACHINE} at {acceptance:g}", "at least", 1.0, times)
    for acceptance, times in SPEEDUPS.items()
)


def _learning(name: str, minutes: float, *argv: str) -> Step:
    """One command of benchmarks/osd/online_learning.py; it keeps its drafts beside its results."""
    command = ("python", "-m", "benchmarks.osd.online_learning", *argv, "--work", "{here}/drafts", "--out", "{here}")
    return Step(name, command, minutes, anew=True)


def _distilled(way: str, *options: str) -> Step:
    """Alike but for `options`: the same prompts, beginning, and held-out texts."""
    command = (
        "adaserve", "distill", "--prompts", "{code-prompts}/code.jsonl", "--reset-top-layer", "--max-tokens", "64",
        "--rate", "1e-3", "--schedule", "cosine", "--step-tokens", "512", *options, "--out",
        "{here}/draft", "--json", "{here}/distilled.json",
    )  # fmt: skip
    return Step(f"distilled-{way}", command, 2, anew=True)


FEW = ("--requests", "500", "--judged", "32", "--every", "50")
NARROW = {
    "code": _learning("narrow-code", 6, "narrow", "code", *FEW),
    "maths": _learning("narrow-maths", 6, "narrow", "maths", "--gsm8k", "{gsm8k}", *FEW),
}
SHIFT = _learning(
    "shift", 8, "shift", "--gsm8k", "{gsm8k}", "--requests", "1280", "--judged", "24", "--every", "40"
)  # fmt: skip
MIX = _learning(
    "mixed", 10, "mixed", "--gsm8k", "{gsm8k}", "--requests", "480", "--judged", "32", "--every", "80"
)  # fmt: skip
PROMPTS = Step(
    "code-prompts",
    ("python", "-m", "benchmarks.osd.prompts", "code", "--count", "256", "--out", "{here}/code.jsonl"), 0.1,
)  # fmt: skip
DISTILLED = {
    TEACHER: _distilled(TEACHER),
    **{way: _distilled(way, "--sampling", way) for way in (STUDENT, MIXED)},
    **{way: _distilled(way, "--loss", way) for way in (REVERSE, JSD)},
}
LEARNED = _learning("medusa", 15, "medusa", "--gsm8k", "{gsm8k}")


def _latency(name: str, prompts: int, *options: str, **drafts: str) -> Step:
    """One command of benchmarks/osd/latency.py. drafts: folders by name."""
    command = (
        "python", "-m", "benchmarks.osd.latency", "--drafts", ",".join(f"{key}={path}" for key, path in drafts.items()),
        *options, "--prompts", str(prompts), "--out", "{here}/latency.json",
    )  # fmt: skip
    return Step(name, command, 4)


LATENCY = _latency(
    "learning-latency", 12, start="{narrow-code}/drafts/start",
    offline="{narrow-code}/drafts/offline-start-code-500", online="{narrow-code}/drafts/online-code",
)  # fmt: skip
FIRST = {"heads": "{medusa}/drafts/heads", "draft": "{medusa}/drafts/start"}
MEDUSA_LATENCY = {
    (what, domain): _latency(
        f"{what}-latency-{domain}", 8, "--domain", domain, "--gsm8k", "{gsm8k}", start=first,
        online=f"{{medusa}}/drafts/{what}-{domain}",
    )
    for what, first in FIRST.items() for domain in MEDUSA_SPEEDUPS
}  # fmt: skip


def _engine(form: Form) -> dict[str, Form | NotYet]:
    return {"cpu": SIMULATED, "engine": form, "gpu": LARGER}


ENTRIES = (
    Entry(
        "osd-table-1", PAPER, "table 1",
        "Acceptance of drafts distilled offline on four data sets, by training method.",
        "One kind of prompts, code, by the model that writes the texts and by the loss.",
        _engine(Form(
            (PROMPTS, *DISTILLED.values()), offline({way: step.name for way, step in DISTILLED.items()}),
            OFFLINE_CLAIMS, "256 pieces of code", "distilled.json",
            f"{PAIR} Acceptance is measured on the held-out eighth of the prompts, over the target's 64 likeliest "
            "tokens. The paper's numbers are Vicuna-7B's on Code-search-Python. There is no training on labels alone.",
        )),
    ),
    Entry(
        "osd-table-2", PAPER, "table 2",
        "Milliseconds per token of one request, by how often the draft is right, for two pairs of models.",
        "Five drafted tokens, on a machine whose draft step costs a seventh of a verification (the larger pair of the "
        "paper: a twelfth), compared with the formula for independent acceptances.",
        {
            "cpu": Form(
                (SPEEDUP,), _speedups(SPEEDUP.name), SPEEDUP_CLAIMS, "one request at a time", "speedup.json",
                "Simulated. The paper's numbers are those of its larger pair.",
            ),
            "gpu": LARGER,
        },
    ),
    Entry(
        "osd-table-3", PAPER, "table 3",
        "Milliseconds per token with the distilled draft, on five data sets.",
        "One request, on code, with three drafts: the first one, one distilled offline, and one that learned from 500 "
        "requests. Chains of two and four.",
        _engine(Form(
            (NARROW["code"], LATENCY), latency(LATENCY.name), SPEED_CLAIMS, "12 pieces of code", "latency.json",
            "The embedded pair on a CPU, its target grown to 110M in f32. The paper's numbers are those of its larger "
            f"pair, and of section 4.2.2. {LONGER}",
        )),
    ),
    Entry(
        "osd-table-4", PAPER, "table 4",
        "Speed with Medusa heads, before and after they learned from the traffic, and with a draft that learned, on "
        "two data sets: one that the heads were not trained for, and one like what they were trained on.",
        "Medusa heads that were distilled from maths, on code and on maths, before and after they learned online from "
        "256 requests; and the draft after it learned from the same. One request, chains of two and four.",
        _engine(Form(
            (LEARNED, *MEDUSA_LATENCY.values()),
            medusa({key: step.name for key, step in MEDUSA_LATENCY.items()}, LEARNED.name), MEDUSA_CLAIMS,
            "8 prompts of each kind", "medusa.json, latency.json",
            "The embedded pair on a CPU, its target and the heads grown to 110M in f32. Chains in place of Medusa's "
            "trees. The draft begins with a random top layer. The paper's numbers are Medusa-7B's on Spider and "
            "Chatbot Arena.",
        )),
    ),
    Entry(
        "osd-3", PAPER, "figure 3",
        "Acceptance over the requests served, while the draft learns from them, on four data sets.",
        "Code and maths, each from the same start, compared with a draft that was distilled offline from the same "
        "prompts in two epochs. The paper's range of gains covers all its data sets.",
        _engine(Form(
            tuple(NARROW.values()), narrow({domain: step.name for domain, step in NARROW.items()}), NARROW_CLAIMS,
            "500 requests of one kind", "narrow-code.json, narrow-maths.json",
            f"{JUDGED} 500 requests in place of 2,000 and more. {LONGER}",
        )),
    ),
    Entry(
        "osd-4", PAPER, "figure 4",
        "The same figure with a data set that changes every 2,000 requests.",
        "Code, maths, requests for functions, and tests, one after another.",
        _engine(Form(
            (SHIFT,), shift(SHIFT.name), SHIFT_CLAIMS, "four kinds, 320 requests each", "shift.json",
            f"{JUDGED} There are no drafts distilled offline from a part of the data.",
        )),
    ),
    Entry(
        "osd-5", PAPER, "figure 5",
        "The same figure for conversations in five languages and on five topics, each with a draft of its own.",
        "The run of figure 6 whose drafts are found by topic: code and maths. The embedded pair speaks English only.",
        _engine(Form(
            (MIX,), topics(MIX.name), TOPIC_CLAIMS, "two kinds at once, 240 requests each", "mixed.json",
            f"{MIXED_JUDGED} There are no languages. One request in ten names its topic, and the router learns from "
            "those.",
        )),
    ),
    Entry(
        "osd-6", PAPER, "figure 6",
        "One draft for all topics, compared with one draft for each.",
        "Code and maths at once: one draft, one for each by the requests' tags, and one for each by topic.",
        _engine(Form(
            (MIX,), routed(MIX.name), ROUTED_CLAIMS, "two kinds at once, 240 requests each", "mixed.json",
            f"{MIXED_JUDGED} With routing by topic, one request in ten names its topic.",
        )),
    ),
)  # fmt: skip
