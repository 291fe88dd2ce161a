"""Measure what learning from the traffic makes of a draft that does not know it: acceptance by requests served.

    python -m benchmarks.osd.online_learning narrow code --work FOLDER --out benchmarks/results/online-learning
    python -m benchmarks.osd.online_learning narrow maths --gsm8k train.jsonl.gz ...
    python -m benchmarks.osd.online_learning head code --work FOLDER ...    # an EAGLE-3 head in place of the draft
    python -m benchmarks.osd.online_learning medusa --gsm8k ...     # Medusa heads that know maths alone
    python -m benchmarks.osd.online_learning shift --gsm8k ...      # four kinds of traffic, one after another
    python -m benchmarks.osd.online_learning mixed --gsm8k ...      # all at once: one draft, and one for each kind

The draft begins with a top layer of random weights, for mixed traffic with no top layer at all, and the EAGLE-3 head
with random weights in its only layer. Each command writes NAME.json below --out: what it began with, and what serving
taught it; narrow and head also what `adaserve distill` makes of the same prompts beforehand, in two epochs, and head in
as many optimiser steps as online. Requests come in waves of eight, at temperature 1, 64 tokens each; the next wave
comes when nothing is left to be learned from the last, so that training takes no time from serving. `figures.py` draws
narrow, shift and mixed.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import typer

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes
from adaserve_jax.distill.offline import reset_top_layer
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.decoder import init_params
from adaserve_jax.models.export import export
from adaserve_jax.models.loading import load_params
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks.osd.prompts import NAMES, Domain, domains, write_prompts
from benchmarks.osd.runs import MAX_TOKENS, TEMPERATURE, Asked, Run, acceptance_of, judge_of, learning_config, run
from benchmarks.osd.views import EQUAL_STEPS, OFFLINE, ONE, SHIPPED, START, TAG, TOPIC

DEMO, HEAD = "demo", "demo-head"
RATE = 1e-3
"""Learning rate of a draft of 0.6M parameters."""
LEARN = LearnConfig(learn_rate=RATE)
LEARN_HEAD = replace(LEARN, learn_delay_ms=1000.0)
"""A head's micro-step runs the target too. Nothing waits for it here, since waves wait for what there is to learn."""
VARIANTS: dict[str, LearnConfig] = {
    "online": LEARN,
    "wrong": replace(LEARN, learn_positions="wrong"),
    "reverse_kl": replace(LEARN, learn_loss="reverse_kl"),
    "jsd": replace(LEARN, learn_loss="jsd"),
    "lora": replace(LEARN, learn_lora_rank=16),
}
"""Ways to learn, by name; "online" is what all other runs use."""

Work = Annotated[Path, typer.Option(help="folder for drafts that are made on the way; kept, and used again")]
Out = Annotated[Path, typer.Option(help="folder of results")]
Gsm8k = Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl.gz, for maths prompts")]
Requests = Annotated[int, typer.Option(help="requests to serve")]
Judged = Annotated[int, typer.Option(help="prompts of each kind that acceptance is measured on")]
Every = Annotated[int, typer.Option(help="requests between two measurements")]
Policy = Annotated[str, typer.Option(help="policy that serves")]
Steps = Annotated[
    int,
    typer.Option(
        help="optimiser steps of an update: more than by default, so that what sets the drafts apart is what they can "
        "hold, not how long they were taught"
    ),
]
Kinds = Annotated[str, typer.Option(help="kinds of traffic, comma-separated")]
Which = Annotated[str, typer.Option(help="of one, tag, topic: the ways to serve it, comma-separated")]
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


def note(text: str) -> None:
    notes().print(text, highlight=False, soft_wrap=True, markup=False)


def _chosen(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    names = comma_list(option, text, str)
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"expected some of {', '.join(known)}, got {name!r}", param_hint=option)
    return names


@app.command()
def narrow(
    domain: Annotated[str, typer.Argument(help=f"one of {', '.join(NAMES)}")],
    work: Work,
    out: Out,
    gsm8k: Gsm8k = None,
    requests: Requests = 2000,
    judged: Judged = 64,
    every: Every = 100,
    policy: Policy = "spec:4",
    variants: Annotated[str, typer.Option(help=f"comma-separated, of {', '.join(VARIANTS)}")] = "online",
) -> None:
    """One kind of traffic: online against the same prompts offline."""
    (domain,), names = _chosen("domain", domain, NAMES), _chosen("--variants", variants, VARIANTS)
    (each,) = domains((domain,), gsm8k, requests, judged)
    start = start_of(work)
    judge = judge_of(DEMO, DEMO, {domain: each.judged})
    offline = offline_of(work, start, each)
    found = {name: acceptance_of(draft, judge) for name, draft in
             {SHIPPED: DEMO, START: start, OFFLINE: offline}.items()}  # fmt: skip
    note(f"{domain}: {found}")
    stream = [Asked(domain, prompt) for prompt in each.served]
    runs = []
    for name in names:
        config = learning_config(start, VARIANTS[name], {}, "tag", policy)
        keep = work / f"{name}-{domain}"
        runs.append(run(f"{domain}/{name}", config, stream, judge, every=every, note=note, keep=keep))
        write(out / f"narrow-{domain}.json", policy, found, runs)


@app.command()
def head(
    domain: Annotated[str, typer.Argument(help=f"one of {', '.join(NAMES)}")],
    work: Work,
    out: Out,
    gsm8k: Gsm8k = None,
    requests: Requests = 384,
    judged: Judged = 24,
    every: Every = 64,
    policy: Policy = "spec:4",
) -> None:
    """One kind of traffic: the embedded EAGLE-3 head online against the same prompts offline."""
    (domain,) = _chosen("domain", domain, NAMES)
    (each,) = domains((domain,), gsm8k, requests, judged)
    start = start_of(work, HEAD)
    judge = judge_of(DEMO, start, {domain: each.judged})
    drafts = {
        SHIPPED: HEAD, START: start, OFFLINE: offline_of(work, start, each),
        EQUAL_STEPS: offline_of(work, start, each, LEARN_HEAD),
    }  # fmt: skip
    found = {name: acceptance_of(draft, judge) for name, draft in drafts.items()}
    note(f"{domain}: {found}")
    stream = [Asked(domain, prompt) for prompt in each.served]
    online = run(f"{domain}/online", learning_config(start, LEARN_HEAD, {}, "tag", policy), stream, judge,
                 every=every, note=note)  # fmt: skip
    write(out / f"head-{domain}.json", policy, found, [online])


@app.command()
def medusa(
    work: Work, out: Out, gsm8k: Gsm8k = None, requests: Requests = 256, judged: Judged = 24, every: Every = 64,
    policy: Policy = "spec:4",
    kinds: Kinds = "code,maths",
    taught: Annotated[str, typer.Option(help="kind of prompts that the heads are distilled from at first")] = "maths",
) -> None:  # fmt: skip
    """Medusa heads that were distilled from one kind of traffic, and a draft: what serving each kind teaches them."""
    each = domains(_chosen("--kinds", kinds, NAMES), gsm8k, requests, judged)
    (home,) = domains(_chosen("--taught", taught, NAMES), gsm8k, 2 * requests, 0)
    heads = distilled(
        work,
        f"heads-{taught}-{requests}",
        home.served[requests:],
        "--head",
        "medusa",
        "--epochs",
        "4",
        "--step-tokens",
        "512",
    )
    found, runs = {}, []
    for name, start, learn in (("heads", heads, LEARN_HEAD), ("draft", start_of(work), LEARN)):
        judge = judge_of(DEMO, start, {domain.name: domain.judged for domain in each})
        found[name] = acceptance_of(start, judge)
        note(f"{name}: {found[name]}")
        for domain in each:
            stream = [Asked(domain.name, prompt) for prompt in domain.served]
            keep = work / f"{name}-{domain.name}"
            runs.append(run(f"{domain.name}/{name}", learning_config(start, learn, {}, "tag", policy), stream, judge,
                            every=every, note=note, keep=keep))  # fmt: skip
            write(out / "medusa.json", policy, found, runs)


@app.command()
def shift(
    work: Work, out: Out, gsm8k: Gsm8k = None, requests: Requests = 2000, judged: Judged = 48, every: Every = 50,
    policy: Policy = "spec:4",
) -> None:  # fmt: skip
    """Four kinds of traffic, one after another."""
    each = domains(NAMES, gsm8k, requests // len(NAMES), judged)
    stream = [Asked(domain.name, prompt) for domain in each for prompt in domain.served]
    _of_all("shift", each, [(ONE, stream, {}, "tag")], start_of(work), out, every, policy)


@app.command()
def mixed(
    work: Work, out: Out, gsm8k: Gsm8k = None, requests: Requests = 3200, judged: Judged = 48, every: Every = 200,
    policy: Policy = "spec:4",
    steps: Steps = 8, which: Which = "one,tag,topic",
    kinds: Kinds = "code,maths",
) -> None:  # fmt: skip
    """All kinds at once, in random order: one draft for all, and one for each, by tag and by topic. Drafts have one
    layer here: the less a draft can hold, the more there is to gain by giving each kind its own."""
    names, wanted = _chosen("--kinds", kinds, NAMES), _chosen("--which", which, (ONE, TAG, TOPIC))
    each = domains(names, gsm8k, requests // len(names), judged)
    stream = [Asked(domain.name, prompt) for domain in each for prompt in domain.served]
    random.Random(0).shuffle(stream)
    start = one_layer_of(work)
    drafts = dict.fromkeys(names, start)
    tagged = [replace(asked, tag=asked.domain) for asked in stream]
    # By topic: a tenth of the clients say what they ask, and that is what the others are told apart by.
    some = [replace(asked, tag=asked.domain if index % 10 == 0 else "") for index, asked in enumerate(stream)]
    ways = [(ONE, stream, {}, "tag"), (TAG, tagged, drafts, "tag"), (TOPIC, some, drafts, "topic")]
    chosen = [way for way in ways if way[0] in wanted]
    _of_all("mixed", each, chosen, start, out, every, policy, replace(LEARN, learn_steps=steps))


def _of_all(
    name: str, each: list[Domain], ways: list[tuple[str, list[Asked], dict[str, str], str]], start: str, out: Path,
    every: int, policy: str, learn: LearnConfig = LEARN,
) -> None:  # fmt: skip
    judge = judge_of(DEMO, start, {domain.name: domain.judged for domain in each})
    found = {START: acceptance_of(start, judge)}
    folders = (resolve_folder(draft, "draft") for draft in (start, DEMO))
    if len(set(map(ModelConfig.from_folder, folders))) == 1:
        found[SHIPPED] = acceptance_of(DEMO, judge)
    runs = []
    for way, stream, drafts, route in ways:
        config = learning_config(start, learn, drafts, route, policy)
        runs.append(run(f"{name}/{way}", config, stream, judge, every=every, note=note))
        write(out / f"{name}.json", policy, found, runs, [asked.domain for asked in ways[0][1]])


def start_of(work: Path, draft: str = DEMO) -> str:
    """Write the embedded draft or head with a top layer of random weights unless it is there; return its folder."""
    folder = work / ("start" if draft == DEMO else f"start-{draft}")
    if not (folder / "config.json").exists():
        source = resolve_folder(draft, "draft")
        config = ModelConfig.from_folder(source, may_be_head=True)
        params = load_params(source, config, jnp.dtype(jnp.float32))
        export(reset_top_layer(params, init_params(config, 0)), source, folder, dtype="f32")
    return str(folder)


def one_layer_of(work: Path) -> str:
    """Write the embedded draft without the layers above its first unless it is there; return its folder."""
    folder, shape = work / "one-layer", work / "one-layer-shape"
    if not (folder / "config.json").exists():
        source = resolve_folder(DEMO, "draft")
        shape.mkdir(parents=True, exist_ok=True)
        for path in source.glob("*.json"):
            shutil.copyfile(path, shape / path.name)
        given = json.loads((source / "config.json").read_text())
        (shape / "config.json").write_text(json.dumps(given | {"num_hidden_layers": 1}))
        params = load_params(source, ModelConfig.from_folder(source), jnp.dtype(jnp.float32))
        kept = {
            name: weight for name, weight in params.items() if not name.startswith("layers.") or "layers.0." in name
        }
        export(kept, shape, folder, dtype="f32")
    return str(folder)


def offline_of(work: Path, start: str, domain: Domain, as_steps: LearnConfig | None = None) -> str:
    """Distil a draft offline from the prompts that will be served, unless it is there; return its folder.

    as_steps: of an online run, where an update of every `learn_every` requests draws `learn_steps` times as many: take
    as many optimiser steps, of as many tokens, if texts are as long as they may be. None: two epochs in steps of the
    usual size.
    """
    name = f"offline-{Path(start).name}-{domain.name}-{len(domain.served)}"
    if as_steps is None:
        return distilled(work, name, domain.served, "--draft", start, "--epochs", "2")
    steps = ("--epochs", str(as_steps.learn_steps), "--step-tokens", str(as_steps.learn_every * MAX_TOKENS))
    return distilled(work, f"{name}-equal-steps", domain.served, "--draft", start, *steps)


def distilled(work: Path, name: str, prompts: list[str], *options: str) -> str:
    """Run `adaserve distill` unless the folder `name` in `work` is there; return that folder."""
    folder = work / name
    if not (folder / "config.json").exists():
        file = work / f"{name}.jsonl"
        write_prompts(file, prompts)
        command = [
            sys.executable, "-m", "adaserve_jax.cli", "distill", "--target", DEMO, *options,
            "--prompts", str(file), "--out", str(folder), "--max-tokens", str(MAX_TOKENS),
            "--temperature", str(TEMPERATURE), "--rate", str(RATE), "--schedule", "cosine",
        ]  # fmt: skip
        note(" ".join(command[1:]))
        subprocess.run(command, check=True)
    return str(folder)


def write(
    path: Path, policy: str, found: dict[str, dict[str, float]], runs: list[Run],
    domains_in_order: list[str] | None = None,
) -> None:  # fmt: skip
    """Write a result. found: acceptance by domain of drafts that do not learn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "commit": source_commit(), "machine": machine_name(), "policy": policy, "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE, "acceptance": found, "runs": [asdict(each) for each in runs],
    }  # fmt: skip
    if domains_in_order is not None:
        result["order"] = domains_in_order
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app()
