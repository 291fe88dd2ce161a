"""Tokens per second of one request by what drafts: nothing, text already seen, the draft model, a head, or several.

    python -m benchmarks.engine.draft_sources --out draft-sources.json [--data FOLDER] [--head FOLDER]

Every task is completed request by request under each policy, in rotation; the target is the demo's, grown to 110M
parameters. "Open text", "packaged workload" and "GSM8K questions" are continued by the target itself, at temperatures 0
and 0.8. Tasks with a reference are replayed, because the embedded target is too small to follow an instruction such as
"rewrite this file": the target may draw nothing but the reference's next token, while the forwards, the trees, the
drafts and the times are real. The forced draw is the engine's own second draw from edited logits, so that every policy
pays for it alike. Speed is that of decoding: tokens after the first over the time since.
--data names a folder with Spec-Bench, HumanEval and GSM8K; without it, the tasks that need none are measured.
--head names an EAGLE-3 head of the demo target. It is grown with the target, runs in a second engine, and drafts under
policies whose sources name HEAD in place of `model`, such as adaserve@head or spec:4@suffix+head.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code, is_held_out
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.types import DraftTrees, LogitEdits, StepOutcome, StepPlan
from adaserve_jax.workloads.workload import load_workload
from benchmarks import program
from benchmarks.grown import grown_head, grown_target

POLICIES = "ar,adaserve@suffix,adaserve@model,adaserve@suffix+model"
HEAD, MODEL = "head", "model"
"""Last source of a policy that drafts by the head, and what its engine calls it."""
MOST_PROMPT, MOST_NEW, OPEN_NEW = 900, 320, 192


@dataclass(frozen=True)
class Reference:
    """A text to write. prompt_tokens: length of its prompt. token_ids: i32[n], the output."""

    prompt_tokens: int
    token_ids: np.ndarray


class Replay:
    """References by the seeds of their requests. `observe` is an argument of `LocalEngine`."""

    def __init__(self) -> None:
        self.references: dict[int, Reference] = {}

    def observe(self, executor: ModelExecutor) -> Any:
        """Return the executor with a `verify` that forces references."""
        return _Replaying(executor, self.references)


class _Replaying:
    def __init__(self, executor: ModelExecutor, references: dict[int, Reference]):
        self._executor = executor
        self._references = references
        self._words = -(-executor.target.config.vocab_size // 32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def verify(
        self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:  # fmt: skip
        forced = self._forced(plan, trees)
        if not (forced >= 0).any():
            return self._executor.verify(plan, trees, edits, meanwhile)
        outcome = self._executor.verify(plan, trees, self._edits(plan, forced), meanwhile)
        return replace(outcome, edited=None, logprobs=None)  # so that the engine learns from what it sees

    def _forced(self, plan: StepPlan, trees: DraftTrees) -> np.ndarray:
        """Return i32[N], the token to draw after each tree node and each prompt's end; -1: any."""
        of_row = [self._references.get(int(seed)) for seed in plan.sampling.seed]
        forced = np.full(trees.num_nodes, -1, np.int32)
        on_path = np.zeros(trees.num_nodes, bool)
        for node, (row, parent, depth) in enumerate(zip(trees.row, trees.parent, trees.depth, strict=True)):
            reference = of_row[row]
            if reference is None:
                continue
            place = int(plan.ctx_len[row]) + int(depth) + 1 - reference.prompt_tokens
            on_path[node] = parent < 0 or (on_path[parent] and trees.token[node] == forced[parent])
            if on_path[node] and place < len(reference.token_ids):
                forced[node] = reference.token_ids[place]
        ends = [of_row[plan.num_decode + index] for index in np.flatnonzero(plan.prefill_final)]
        firsts = [-1 if reference is None else int(reference.token_ids[0]) for reference in ends]
        return np.concatenate([forced, np.array(firsts, np.int32)])

    def _edits(self, plan: StepPlan, forced: np.ndarray) -> LogitEdits:
        rows, changed = plan.num_rows, forced >= 0
        allowed = np.full((len(forced), self._words), 0xFFFFFFFF, np.uint32)
        allowed[changed] = 0
        at = np.flatnonzero(changed)
        allowed[at, forced[at] // 32] = np.uint32(1) << (forced[at] % 32).astype(np.uint32)
        nothing = np.zeros(0, np.int32)
        return LogitEdits(
            np.zeros(rows, np.float32), np.zeros(rows, np.float32), np.ones(rows, np.float32), nothing, nothing,
            nothing, np.zeros(0, bool), np.zeros(0, np.float32), allowed, changed, np.full(rows, -1, np.int32),
        )  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One request. reference: text to write; "": the target writes its own."""

    prompt: str
    reference: str = ""


def tasks(data: Path | None, count: int, seed: int) -> dict[str, list[Item]]:
    """Return `count` items of every task by name; those of real data where `data`, a folder, has them."""
    rng = np.random.default_rng(seed)
    packaged = [each.prompt for each in load_workload().items if each.prompt is not None]
    found = {
        "code edit": code_edits(count, rng),
        "JSON records": json_records(count, rng),
        "open text": [Item(prompt) for prompt in packaged][:count],
        "packaged workload": [
            Item(prompt) for prompt in rng.permutation(packaged[count:] or packaged)[:count].tolist()
        ],
    }
    if data is not None:
        questions = _lines(data / "spec-bench" / "question.jsonl.gz")
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for question in questions:
            by_kind.setdefault(question["category"], []).append(question)
        found["quoting summary"] = [quoting_summary(each["turns"][0]) for each in by_kind["summarization"][:count]]
        for kind in ("summarization", "translation", "rag", "math_reasoning"):
            found[f"Spec-Bench {kind}"] = [_answered(each) for each in by_kind[kind][:count]]
        chats = [each for kind in ("coding", "math", "reasoning") for each in by_kind[kind] if each.get("reference")]
        found["chat, second turn"] = [second_turn(each) for each in chats[:count]]
        problems = _lines(data / "human-eval" / "HumanEval.jsonl.gz")[:count]
        found["HumanEval"] = [Item(each["prompt"], each["canonical_solution"]) for each in problems]
        sums = _lines(data / "gsm8k" / "train.jsonl.gz")[:count]
        found["GSM8K"] = [Item(f"Question: {each['question']}\nAnswer: ", each["answer"]) for each in sums]
        unseen = [each for each in _lines(data / "gsm8k" / "train.jsonl.gz") if is_held_out(each["question"].strip())]
        found["GSM8K questions"] = [Item(f"Question: {each['question']}\nAnswer:") for each in unseen[:count]]
    return found


def code_edits(count: int, rng: np.random.Generator, chars: int = 1200) -> list[Item]:
    """Return pieces of Python files with the instruction to rename a name, and the renamed piece as the reference."""
    found: list[Item] = []
    files = [text for text in held_out_code() if len(text) > 2 * chars]
    while len(found) < count:
        lines = files[int(rng.integers(len(files)))].splitlines(keepends=True)
        start = int(rng.integers(len(lines)))
        piece = ""
        for line in lines[start:]:
            if len(piece) + len(line) > chars:
                break
            piece += line
        names = [name for name in re.findall(r"\b[a-z_]{4,}\b", piece) if piece.count(name) >= 3]
        if len(piece) < chars // 2 or not names:
            continue
        name = names[int(rng.integers(len(names)))]
        edited = re.sub(rf"\b{name}\b", f"{name}_all", piece)
        found.append(Item(f"# Rename {name} to {name}_all.\n{piece}\n# The renamed code:\n", edited))
    return found


def json_records(count: int, rng: np.random.Generator, records: int = 12) -> list[Item]:
    """Return lists of records with the same keys and drawn values."""
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", " ".join(held_out_code()))))

    def record(index: int) -> dict[str, Any]:
        first, second = (words[int(rng.integers(len(words)))] for _ in range(2))
        return {
            "id": index,
            "name": first,
            "tags": [second],
            "active": bool(rng.integers(2)),
            "size": int(rng.integers(999)),
        }

    found = []
    for _ in range(count):
        text = json.dumps([record(index) for index in range(records)], indent=1)
        found.append(Item(f"The {records} records as JSON:\n", text))
    return found


def quoting_summary(prompt: str, sentences: int = 4) -> Item:
    """Return a summary that quotes: the longest of the article's first sentences, in order."""
    article = prompt.partition(":")[2].strip()[:1500]
    parts = re.split(r"(?<=[.!?]) +", article)[:12]
    chosen = sorted(sorted(range(len(parts)), key=lambda index: -len(parts[index]))[:sentences])
    quoted = " ".join(f'It says: "{parts[index]}"' for index in chosen)
    return Item(f"Summarize with quotes: {article}\nSummary: ", quoted)


def second_turn(question: dict[str, Any]) -> Item:
    """Return a chat's second turn, which resends the first with its answer."""
    (first, second), answers = question["turns"][:2], question["reference"]
    return Item(f"User: {first}\nAssistant: {_text(answers[0])}\nUser: {second}\nAssistant: ", _text(answers[-1]))


def encoded(
    item: Item, encode: Callable[[str], list[int]], most_prompt: int, most_new: int
) -> tuple[list[int], list[int]]:
    """Return the token ids of prompt and reference, cut at the prompt's beginning and the reference's end."""
    return encode(item.prompt)[-most_prompt:], encode(item.reference)[:most_new] if item.reference else []


def _answered(question: dict[str, Any]) -> Item:
    return Item(f"{question['turns'][0]}\nAnswer: ", _text(question["reference"]))


def _text(reference: Any) -> str:
    """Return the first text of a reference, which may be lists of alternatives."""
    while not isinstance(reference, str):
        reference = reference[0]
    return reference


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@dataclass
class SourceRow:
    """Decoding of one task under one policy.

    seconds: of each round, by request. tokens, steps: of one round. request_tokens, request_steps: the same by request;
    requests of one prompt stand together, one for each of `seeds`. texts_differ: texts that are not those of the first
    policy.
    """

    task: str
    policy: str
    replayed: bool
    temperature: float
    tokens: int
    seconds: list[list[float]]
    steps: int
    drafted: int
    accepted: int
    suffix_drafted: int
    suffix_accepted: int
    texts_differ: int
    seeds: int
    request_tokens: list[int]
    request_steps: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second, each request at the median of its rounds: a disturbance spoils one request, no round."""
        return self.tokens / float(np.median(self.seconds, axis=0).sum())


def measure(
    engine: Callable[[str], tuple[LLM, str]], replay: Replay, name: str, items: list[Item], policies: tuple[str, ...],
    repeats: int, temperature: float, seeds: int,
) -> list[SourceRow]:  # fmt: skip
    """Complete the items of a task one by one, under each policy in rotation.

    engine: returns the engine of a policy, and what it calls the policy. seeds: of each item.
    """
    encode = engine(policies[0])[0].tokenizer.encode
    prompts = [encoded(item, encode, MOST_PROMPT, MOST_NEW) for item in items]
    prompts = [each for each, item in zip(prompts, items, strict=True) if len(each[1]) > 1 or not item.reference]
    prompts = [each for each in prompts for _ in range(seeds)]
    replayed = bool(prompts[0][1])
    replay.references = {
        index: Reference(len(ids), np.array(text, np.int32)) for index, (ids, text) in enumerate(prompts) if text
    }
    rows: dict[str, SourceRow] = {}
    texts: dict[str, list[list[int]]] = {}
    for number in range(repeats):
        first = number % len(policies)
        for policy in policies[first:] + policies[:first]:
            llm, called = engine(policy)
            llm.set_policy(called)  # a new scheduler, which knows no texts
            seconds, outputs = [], []
            for index, (ids, text) in enumerate(prompts):
                params = SamplingParams(
                    max_tokens=len(text) or OPEN_NEW, temperature=temperature, seed=index, ignore_eos=True
                )
                (output,) = llm.generate([ids], params)
                outputs.append(output)
                assert output.metrics.tpot_s is not None
                seconds.append(output.metrics.tpot_s * (len(output.token_ids) - 1))
            stats, found = llm.stats().scheduler, [output.metrics for output in outputs]
            texts.setdefault(policy, [output.token_ids for output in outputs])
            if policy in rows:
                rows[policy].seconds.append(seconds)
                continue
            tokens = [len(output.token_ids) - 1 for output in outputs]
            steps = [m.verify_steps for m in found]
            rows[policy] = SourceRow(
                name, policy, replayed, temperature, sum(tokens), [seconds], sum(steps),
                sum(m.drafted_tokens for m in found), sum(m.accepted_tokens for m in found), stats.suffix_tokens,
                stats.suffix_accepted_tokens, 0, seeds, tokens, steps,
            )  # fmt: skip
    for policy, row in rows.items():
        row.texts_differ = sum(a != b for a, b in zip(texts[policy], texts[policies[0]], strict=True))
    return [rows[policy] for policy in policies]


def show(rows: list[SourceRow], console: Console) -> None:
    """Print every task's speed over that of the first policy."""
    names = list(dict.fromkeys(row.policy for row in rows))
    table = Table("task", "T", f"{names[0]}, tokens/s", *names[1:], title="times the tokens/s of the first policy")
    for task, temperature in dict.fromkeys((row.task, row.temperature) for row in rows):
        here = {row.policy: row for row in rows if (row.task, row.temperature) == (task, temperature)}
        first = here[names[0]].rate
        cells = [f"{here[name].rate / first:.2f}" for name in names[1:]]
        table.add_row(task, f"{temperature:g}", f"{first:.1f}", *cells)
    console.print(table)


@contextmanager
def engines(config: EngineConfig, replay: Replay, head: str, params: str) -> Iterator[dict[str, LocalEngine]]:
    """Start an engine with the draft, MODEL, and one with the head, HEAD, if there is one."""
    configs = {MODEL: config if params == "none" else replace(config, target=str(grown_target(params)))}
    with ExitStack() as stack:
        if head:
            folder = resolve_folder(head, "draft")
            if params != "none":
                scratch = Path(stack.enter_context(TemporaryDirectory(prefix="adaserve-head-")))
                folder = grown_head(folder, params, scratch / "grown")
            configs[HEAD] = replace(configs[MODEL], draft=str(folder))
        found = {}
        with progress_bar() as progress:
            for name, each in configs.items():
                found[name] = LocalEngine(each, progress, replay.observe)
                stack.callback(found[name].close)
                found[name].start()
        yield found


@takes("config", EngineConfig, without=("policy", "target"))
def draft_sources(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    data: Annotated[Path | None, typer.Option(help="folder with spec-bench/, human-eval/ and gsm8k/")] = None,
    head: Annotated[str, typer.Option(help="EAGLE-3 head of the demo target; none: only the draft")] = "",
    policies: Annotated[str, typer.Option(help="policies, separated by commas; the first is the reference")] = POLICIES,
    params: Annotated[str, typer.Option(help="size to grow the demo target to; none: the demo target itself")] = "110M",
    count: Annotated[int, typer.Option(help="requests of each task")] = 6,
    seeds: Annotated[int, typer.Option(help="seeds of each request at a temperature above 0")] = 1,
    repeats: Annotated[int, typer.Option(help="rounds")] = 3,
    only: Annotated[str, typer.Option(help="tasks, separated by commas; none: all")] = "",
) -> None:
    """Measure what each draft source is worth, task by task."""
    names, console, replay = comma_list("policies", policies, str), Console(width=160), Replay()
    if not head and any(name.endswith(HEAD) for name in names):
        raise ConfigError(f"policies that draft by a head need one; give --head, got --policies {policies}")
    wanted = comma_list("only", only, str) if only else ()
    started, rows = time.perf_counter(), []
    with engines(config, replay, head, params) as running:
        llms = {name: LLM.over(engine) for name, engine in running.items()}

        def engine(policy: str) -> tuple[LLM, str]:
            drafts = HEAD if policy.endswith(HEAD) else MODEL
            return llms[drafts], policy.removesuffix(HEAD) + MODEL if drafts == HEAD else policy

        for name, items in tasks(data, count, config.seed).items():
            if wanted and name not in wanted:
                continue
            for temperature in (0.0,) if items[0].reference else (0.0, 0.8):
                each = seeds if temperature else 1
                rows += measure(engine, replay, name, items, names, repeats, temperature, each)
                console.print(f"{name}: {time.perf_counter() - started:.0f} s so far", highlight=False)
        compiles = sum(each.executor.compiles_after_ready for each in running.values())
    show(rows, console)
    options = {"head": head, "only": only, "seeds": "" if seeds == 1 else str(seeds)}
    given = "".join(f" --{name} {shlex.quote(value)}" for name, value in options.items() if value)
    result = {
        "command": f"python -m benchmarks.engine.draft_sources --out {out.name} --data FOLDER "
        f"--policies {policies} --params {params} --count {count} --repeats {repeats}{given}",
        "commit": source_commit(), "machine": machine_name(),
        "target": "demo" if params == "none" else f"demo grown to {params}",
        "draft": config.draft, "head": head, "compiles_after_ready": compiles, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    program.run(draft_sources)
