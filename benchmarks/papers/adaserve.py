"""AdaServe's figures 8 to 15 (section 6): what they show, and how they are measured and read here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.traces import DURATION_S, PEAKS, Trace, load_trace
from adaserve_jax.workloads.workload import load_workload
from benchmarks.papers.bench_reading import bench_claims, bench_rows
from benchmarks.papers.entry import Claim, Entry, Folders, Form, Found, Step
from benchmarks.papers.reading import figure, read_json, series
from benchmarks.papers.sweep_reading import sweeps

PAPER = "AdaServe"
MACHINES = ("llama-70b", "qwen-32b")
CONTENDERS = "adaserve,adaserve-paper,ar,sarathi,spec:4,spec:6"
"""Ours, the paper's policy, and the baselines that the paper compares with."""
MIX = "60 % code, 20 % chat, 20 % summarization"
SIMULATED = (
    "Simulated, with the scheduler that serves. Times of verification and drafting are those in the authors' scripts; "
    "acceptance is drawn by class. Attainment is by TPOT alone, as in the paper."
)
TARGET = "110M"
BENCH = ("adaserve,adaserve-paper,spec:4,sarathi,ar", "1,2,4")
"""Policies and requests per second of the real engine on a CPU."""
GPU_BENCH = ("adaserve,adaserve-paper,spec:2,spec:4,sarathi,ar", "8,16,24,32,40,48")


def _sweep(sweep: str, minutes: float) -> Step:
    argv = (
        "python", "-m", "benchmarks.adaserve.sweeps", "--traces", "{traces}", "--sweeps", sweep, "--targets", "tpot",
        "--only", CONTENDERS, "--out", "{here}",
    )  # fmt: skip
    return Step(f"sweeps-{sweep}", argv, minutes)


def _both(claims: Iterable[tuple[str, str, float | None, float | None, float]]) -> tuple[Claim, ...]:
    """For each of the machines: text, value, the paper's numbers for the two, and the line that it must be above,
    or at least at where the paper has no number."""
    return tuple(
        Claim(f"{machine}: {text}", f"{machine}: {value}", "at least" if paper is None else "above", line, paper)
        for text, value, *papers, line in claims
        for machine, paper in zip(MACHINES, papers, strict=True)
    )


def _simulated(sweep: str, minutes: float, claims: tuple[Claim, ...], workload: str) -> Form:
    step = _sweep(sweep, minutes)
    return Form((step,), sweeps(step.name, sweep), claims, workload, "sweeps.jsonl", SIMULATED)


GROWN = Step("grown-110m", ("adaserve", "grow", "{here}/model", "--params", TARGET), 1, anew=True)
GROWN_8B = Step(
    "grown-8b", ("adaserve", "grow", "{here}/model", "--params", "8B", "--dtype", "bf16"), 5, gpu=True, anew=True
)
ON_CPU = "The demo pair, its target grown to 110M in f32, on a CPU"
IN_MINIATURE = f"{ON_CPU}; the packaged workload."
ON_ONE_GPU = "The demo pair, its target grown to 8B in bf16, on one GPU"
ON_GPU = f"{ON_ONE_GPU}; the packaged workload."
REAL = {"engine": ("110m", GROWN, BENCH, IN_MINIATURE), "gpu": ("8b", GROWN_8B, GPU_BENCH, ON_GPU)}
"""Of the real engine at both sizes: name and making of its target, policies and rates, what differs."""


def _bench(
    size: str, kind: str, minutes: float, *, name: str = "", rates: str = "", by: str = "rate_rps",
    duration_s: int = 60, options: tuple[str, ...] = (),
) -> Form:  # fmt: skip
    """A run of `adaserve bench` at a size of REAL, at its rates or others. by: the column that is varied; name: of the
    run, beside the one that serves every figure over rates."""
    target, grown, (policies, usual), differs = REAL[size]
    argv = (
        "adaserve", "bench", "--target", f"{{{grown.name}}}/model", "--draft", "demo", "--policies", policies,
        "--rates", rates or usual, "--duration", str(duration_s), *options, "--resume", "--out", "{here}",
    )  # fmt: skip
    run = Step(f"bench-{target}{name and f'-{name}'}", argv, minutes, gpu=size == "gpu")
    return Form((grown, run), bench_rows(run.name, by), bench_claims(kind), "packaged", "results.jsonl", differs)


def _real(kind: str) -> dict[str, Form]:
    """The real engine over rates, in miniature and on a GPU; one run serves every figure over rates."""
    return {"engine": _bench("engine", kind, 9, duration_s=30), "gpu": _bench("gpu", kind, 45)}


RATE_CLAIMS = (
    ("largest ratio of attainment to the best baseline's", "attainment times", 2.1, 1.6, 1.0),
    ("best baseline's violations over ours, at the highest rate", "violations times at the last", 4.3, 3.2, 1.0),
    ("smallest lead in attainment over the best baseline, all rates", "least lead", None, None, 0.0),
)
GOODPUT_CLAIMS = (
    ("largest ratio of goodput to the best baseline's", "goodput times", 1.9, 1.7, 1.0),
    ("smallest ratio of goodput to the best baseline's, all rates", "least goodput times", None, None, 1.0),
)
URGENT_CLAIMS = (
    ("largest ratio of the best baseline's violations to ours", "violations times", 4.3, 3.7, 1.0),
    ("largest ratio of goodput to the best baseline's", "goodput times", 1.30, 1.64, 1.0),
    ("smallest lead in attainment over the best baseline, all shares", "least lead", None, None, 0.0),
)
SCALE_CLAIMS = (
    ("largest ratio of the best baseline's violations to ours", "violations times", 4.61, 3.05, 1.0),
    ("largest ratio of goodput to the best baseline's", "goodput times", 1.38, 1.38, 1.0),
    ("smallest lead in attainment over the best baseline, all scales", "least lead", None, None, 0.0),
)
STRICT_CLAIMS = tuple(
    Claim(
        f"{machine}: largest attainment of continuous batching at scales below 1",
        f"{machine}: continuous batching where strict", "at most", 0.4, 0.4, "share",
    )
    for machine in MACHINES
)  # fmt: skip
FALLS = "accepted tokens at the lowest rate over those at the highest"
VARIES = "variation of the accepted tokens of fixed chains over rates"
ACCEPTED_CLAIMS = (
    *(Claim(f"{at}: {FALLS}", f"{at}: accepted falls", "at least", 1.0) for at in MACHINES),
    *(Claim(f"{at}: {VARIES}", f"{at}: accepted of chains varies", "at most", 0.05, None, "share") for at in MACHINES),
)
IN_TURN = ("--arrivals", "peaks:chat=75,code=195,summary=285")
FLUCTUATING_CLAIMS = (
    ("smallest lead in attainment over the best baseline, all mean rates", "least lead", None, None, 0.0),
)

BIN_S, WINDOW_S = 10.0, 60.0
OFF_S = 20.0
"""Seconds that a peak may be off the one read from the paper's figure."""
PEAK_CLAIMS = (
    Claim("largest distance of a class's busiest minute from the paper's peak, seconds", "peaks off, s", "at most",
          OFF_S, None, "s"),
    Claim("smallest ratio of arrivals in a class's busiest minute to those in an average minute", "least swing",
          "at least", 1.0),
)  # fmt: skip


def peaks(step: str) -> Callable[[Folders], Found]:
    """Read figure 13 from the trace that a simulation kept."""

    def read(folders: Folders) -> Found:
        files = sorted(folders[step].glob("trace-*.jsonl.gz"))
        if not files:
            raise ConfigError(f"{folders[step]} has no trace-*.jsonl.gz; remove the folder and run the figure again")
        # A trace counts from its first request, the paper's figure from the start of the six minutes.
        first_s = min(item.arrival_s or 0.0 for item in load_workload(files[-1], texts=False).items)
        trace = load_trace(files[-1])
        requests = tuple(dataclasses.replace(each, due_s=each.due_s + first_s) for each in trace.requests)
        return found_in(dataclasses.replace(trace, requests=requests))

    return read


def found_in(trace: Trace) -> Found:
    """Where each class peaks: the middle of the minute that has most of its requests."""
    times = {name: np.array([r.due_s for r in trace.requests if r.slo_class == name]) for name in PEAKS}
    busiest = {name: _busiest(at) for name, at in times.items()}
    values = {
        "peaks off, s": max(abs(busiest[name][0] - PEAKS[name].at_s) for name in PEAKS),
        "least swing": min(
            busiest[name][1] / (len(at) * WINDOW_S / DURATION_S) for name, at in times.items() if len(at)
        ),
    }  # fmt: skip
    edges = np.arange(0.0, DURATION_S + BIN_S, BIN_S)
    curves = {
        name: dict(zip(edges[:-1].tolist(), (np.histogram(at, edges)[0] / BIN_S).tolist(), strict=True))
        for name, at in times.items()
    }
    shown = figure("arrivals", "Arrivals by class", trace.name, "seconds", [("arrivals", "requests/s", series(curves))])
    return Found(values, (shown,), {"workload": trace.name})


def _busiest(at_s: np.ndarray) -> tuple[float, int]:
    """(middle, requests) of the busiest window that begins at a whole second; of equals, the middle one."""
    starts = np.arange(0.0, DURATION_S - WINDOW_S + 1)
    counts = np.array([np.count_nonzero((at_s >= start) & (at_s < start + WINDOW_S)) for start in starts])
    best = np.flatnonzero(counts == counts.max())
    return float(starts[best[len(best) // 2]] + WINDOW_S / 2), int(counts.max())


POLICY = "adaserve"
PHASES = ("plan", "draft", "select", "verify", "commit")
MINIMAL = 0.01
"""The largest share of the serving time that counts as next to nothing."""
SHARE_CLAIMS = (
    Claim("share of the serving time that selection takes", "select share", "at most", MINIMAL, 0.0041, "share"),
    Claim("share of the serving time, with the choice of depth, width and budget", "plan and select share",
          "at most", MINIMAL, None, "share"),
)  # fmt: skip


def host_share(step: str) -> Callable[[Folders], Found]:
    """Read figure 15 from benchmarks/engine/host_share.py; the paper's number is that of its larger model."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "share.json")
        row = next(row for row in result["rows"] if row["policy"] == POLICY)
        values = {
            "select share": row["select_ms"] / row["wall_ms"],
            "plan and select share": row["plan_and_select_share"],
        }
        bars = series({phase: {POLICY: row[f"{phase}_ms"]} for phase in PHASES})
        caption = f"Milliseconds per step, {result['requests']} requests at once."
        shown = figure("phases", "Phases of a step", caption, "policy", [("phases", "ms per step", bars)], kind="stack")
        return Found(values, (shown,), {name: str(result[name]) for name in ("commit", "machine")})

    return read


ENTRIES = (
    Entry(
        "adaserve-8", PAPER, "figure 8",
        "The share of requests whose TPOT target is met, over requests per second, on two models.",
        "The same figure at the rates of the traces, on simulated machines of both shapes.",
        {"cpu": _simulated("rate", 4, _both(RATE_CLAIMS), MIX), **_real("attainment")},
    ),
    Entry(
        "adaserve-9", PAPER, "figure 9",
        "Tokens per second of the requests whose target is met, over requests per second.",
        "The runs of figure 8.",
        {"cpu": _simulated("rate", 4, _both(GOODPUT_CLAIMS), MIX), **_real("goodput")},
    ),
    Entry(
        "adaserve-10", PAPER, "figure 10",
        "Attainment and goodput over the share of urgent requests, at 4 requests per second.",
        "The same figure at three shares.",
        {
            "cpu": _simulated("urgent", 2, _both(URGENT_CLAIMS), "urgent shares 0.3, 0.6 and 0.9"),
            "gpu": _bench(
                "gpu", "attainment", 30, name="urgent", rates="24", by="urgent_share",
                options=("--urgent-shares", "0.3,0.5,0.7,0.9"),
            ),
        },
    ),
    Entry(
        "adaserve-11", PAPER, "figure 11",
        "Attainment and goodput over the urgent requests' target, in multiples of the baseline latency.",
        "The same figure at six scales.",
        {
            "cpu": _simulated("scale", 3, (*_both(SCALE_CLAIMS), *STRICT_CLAIMS), MIX),
            "gpu": _bench(
                "gpu", "attainment", 30, name="scale", rates="24", by="slo_scale",
                options=("--slo-scales", "0.6,0.8,1,1.2,1.4,1.6"),
            ),
        },
    ),
    Entry(
        "adaserve-12", PAPER, "figure 12",
        "Draft tokens accepted per verification of a request, over requests per second. Under AdaServe they fall with "
        "the load, under fixed chains they stay the same.",
        "The runs of figure 8. The bonus token is not counted.",
        {"cpu": _simulated("rate", 4, ACCEPTED_CLAIMS, MIX), **_real("accepted")},
    ),
    Entry(
        "adaserve-13", PAPER, "figure 13",
        "Arrivals of a synthetic trace of six minutes in which chat, code and summarization peak in turn.",
        "A trace generated in the same shape.",
        {
            "cpu": Form(
                (Step("fluctuating", (
                    "adaserve", "simulate", "--fluctuating", "--policies", "ar", "--ttft-slo", "0", "--no-token-times",
                    "--save-traces", "--out", "{here}",
                ), 0.2, anew=True),),
                peaks("fluctuating"), PEAK_CLAIMS, "generated", "trace-*.jsonl.gz",
                "The paper draws the trace but does not publish it. We read its peaks off the figure.",
            ),
        },
    ),
    Entry(
        "adaserve-14", PAPER, "figure 14",
        "Attainment under the trace of figure 13: AdaServe is above every baseline.",
        "The same figure at three mean rates; on the real engine at one.",
        {
            "cpu": _simulated("fluctuating", 2, _both(FLUCTUATING_CLAIMS), "classes that peak in turn"),
            "engine": _bench(
                "engine", "attainment", 32, name="peaks", rates="4", duration_s=360, options=IN_TURN
            ),
            "gpu": _bench("gpu", "attainment", 40, name="peaks", rates="24", duration_s=360, options=IN_TURN),
        },
    ),
    Entry(
        "adaserve-15", PAPER, "figure 15",
        "Shares of the serving time for speculation, selection and verification. Selection, on the CPU, takes next to "
        "nothing.",
        "The phases of the real engine's steps, 16 requests at once. On a CPU, drafting and verification run on the "
        "same cores as selection.",
        {
            "cpu": Form(
                (GROWN, Step("phases-110m", (
                    "python", "-m", "benchmarks.engine.host_share", "--target", "{grown-110m}/model",
                    "--policies", "adaserve",
                    "--tokens", "128", "--out", "{here}/share.json",
                ), 2)),
                host_share("phases-110m"), SHARE_CLAIMS, "one prompt, 16 at once", "share.json", f"{ON_CPU}.",
            ),
            "gpu": Form(
                (GROWN_8B, Step("phases-8b", (
                    "python", "-m", "benchmarks.engine.host_share", "--target", "{grown-8b}/model",
                    "--policies", "adaserve",
                    "--requests", "64", "--out", "{here}/share.json",
                ), 4, gpu=True)),
                host_share("phases-8b"), SHARE_CLAIMS, "one prompt, 64 at once", "share.json", f"{ON_ONE_GPU}.",
            ),
        },
    ),
)  # fmt: skip
