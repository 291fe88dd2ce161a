"""StarSD's table 1 and figures 4 to 6: one draft that serves several targets, and what it costs to be idle."""

from __future__ import annotations

from benchmarks.papers import star_claims as claims
from benchmarks.papers import star_reading as read
from benchmarks.papers.entry import Entry, Form, NotYet, Step

PAPER = "StarSD"
GPUS = NotYet(
    "one GPU for the draft and one for each target, seven in the paper. The figure measures how idle the draft is "
    "while targets verify; on one shared GPU it is never idle"
)
PACED = (
    "The draft, its service and the messages are real, on one machine. Targets sleep for as long as a verification "
    "takes and have one request each. There is no network between hosts."
)
TABLE = Step(
    "star-table-1",
    ("python", "-m", "benchmarks.starsd.table1", "--rounds", "3", "--seconds", "5", "--out", "{here}/table1.json"), 7,
    anew=True,
)  # fmt: skip
ENGINES = Step(
    "star-engines",
    (
        "python", "-m", "benchmarks.starsd.table1", "--rounds", "3", "--seconds", "10", "--targets", "1",
        "--engines", "2", "--out", "{here}/table1.json",
    ),
    10, anew=True,
)  # fmt: skip
APART = Step("star-apart", ("python", "-m", "benchmarks.starsd.apart", "--out", "{here}/apart.json"), 4, anew=True)
IDLE = Step("star-idle", ("python", "-m", "benchmarks.starsd.idle", "--out", "{here}/idle.json"), 3, anew=True)
IDLE_GPU = Step(
    "star-idle-gpu", ("python", "-m", "benchmarks.starsd.idle", "--samples", "200", "--out", "{here}/idle.json"), 12,
    gpu=True, anew=True,
)  # fmt: skip
TEXTS = "24 texts of the demo target, one request a target"

ENTRIES = (
    Entry(
        "starsd-table-1", PAPER, "table 1",
        "Throughput, waiting and idle times, rounds per second and load of one draft for one to six targets.",
        "The same quantities, both one request at a time as in the paper and with batched drafts.",
        {
            "cpu": Form((TABLE,), read.table1(TABLE.name), claims.TABLE_CLAIMS, TEXTS, "table1.json", PACED),
            "engine": Form(
                (ENGINES,), read.engines(ENGINES.name), claims.ENGINE_CLAIMS, TEXTS, "table1.json",
                "Whole engines in place of paced targets, with the demo's target grown to 110M. Two of them, the "
                "draft and everything else share the cores, so a second target slows the first one down. The "
                "paper's draft is an EAGLE-2 head. Here the service has the 10M draft, and one engine without the "
                "service has the demo's EAGLE-3 head.",
            ),
            "gpu": GPUS,
        },
    ),
    Entry(
        "starsd-4", PAPER, "figure 4",
        "The cost of separating draft and target: throughput and rounds per second over a benchmark, and the time of "
        "messages.",
        "The same target with the draft in its process and with a draft service, in turns, window by window.",
        {
            "cpu": Form((APART,), read.apart(APART.name), claims.APART_CLAIMS, TEXTS, "apart.json", PACED),
            "gpu": GPUS,
        },
    ),
    Entry(
        "starsd-5", PAPER, "figure 5",
        "Rounds per second of the draft and of a target, and the draft's load, by targets.",
        "The runs of table 1, one request at a time.",
        {
            "cpu": Form((TABLE,), read.rounds(TABLE.name), claims.ROUND_CLAIMS, TEXTS, "table1.json", PACED),
            "gpu": GPUS,
        },
    ),
    Entry(
        "starsd-6", PAPER, "figure 6",
        "Time of a draft token by the draft's idle time before it, without and with a warm-up.",
        "The model of the draft service alone. It sleeps between drafts, and to warm up it drafts a few chains before "
        "the timed one.",
        {
            "cpu": Form(
                (IDLE,), read.idle(IDLE.name), claims.IDLE_CLAIMS, "one request", "idle.json",
                "On a CPU, without the panel of clock frequencies. The paper's numbers are for one and two targets, "
                f"which leave its draft idle for {claims.PAPER[1]['idle_s'] * 1e3:g} and "
                f"{claims.PAPER[2]['idle_s'] * 1e3:g} ms.",
            ),
            "gpu": Form(
                (IDLE_GPU,), read.idle(IDLE_GPU.name), claims.IDLE_CLAIMS, "one request", "idle.json",
                "Without the panel of clock frequencies, because fixing them needs special rights.",
            ),
        },
    ),
)  # fmt: skip
