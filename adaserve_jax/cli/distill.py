"""`adaserve distill`: trains a draft to agree with its target, or writes a draft that a server learned."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaserve_jax.cli.options import FormatOption, read_text, takes
from adaserve_jax.cli.terminal import (
    INTERRUPTED_STATUS,
    check_writable,
    number_table,
    progress_bar,
    resume_command,
    say,
    table_console,
    write_json,
)
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.engine.client import check_ids
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.writing import TYPES, check_new
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit
from adaserve_jax.types import Progress
from adaserve_jax.workloads.readers import AUTO
from adaserve_jax.workloads.workload import PACKAGED, load_workload

if TYPE_CHECKING:
    from adaserve_jax.distill.offline import Distillation, Evaluation, Models
    from adaserve_jax.models.tokenizer import Tokenizer

DTYPES = ("auto", "f32", "bf16")
HEADS = ("none", "eagle3", "medusa")
OF_WRITING = frozenset({"from_checkpoint", "draft_name", "lora_rank", "target", "draft", "dtype", "save_dtype", "out"})
"""Parameters that --from-checkpoint takes."""


@takes("config", OfflineConfig)
def distill(
    context: typer.Context,
    config: OfflineConfig,
    out: Annotated[Path, typer.Option(help="folder to write the draft to, new or empty: a Hugging Face checkpoint")],
    target: Annotated[
        str, typer.Option(help="checkpoint folder of the target, or 'demo'; --from-checkpoint needs it for heads alone")
    ] = "demo",
    draft: Annotated[
        str, typer.Option(help="checkpoint folder of the draft or head to begin with, 'demo' or 'demo-head'")
    ] = "demo",
    head: Annotated[
        str,
        typer.Option(
            help="begin with new heads of the target, in place of --draft: eagle3, an EAGLE-3 head; medusa, four "
            "Medusa heads; none: do not"
        ),
    ] = "none",
    prompts: Annotated[
        str,
        typer.Option(help=f"file of prompts: .txt, one on each line, or any workload; '{PACKAGED}': the packaged one"),
    ] = "",
    format: FormatOption = AUTO,
    dtype: Annotated[
        str, typer.Option(help="type that both models compute in: f32, bf16, or auto, by device")
    ] = "auto",
    save_dtype: Annotated[
        str, typer.Option(help="type of the weights that are written: f16, bf16, f32, or auto, that of the draft")
    ] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="go on with a run that was stopped, by its --out")] = False,
    from_checkpoint: Annotated[
        Path | None,
        typer.Option(help="a server's learn_folder: write what it learned, and train nothing"),
    ] = None,
    draft_name: Annotated[str, typer.Option(help="with --from-checkpoint: the server's name of the draft")] = "default",
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the result to this file")] = None,
) -> None:
    """Train a draft to agree with its target, and write it as a checkpoint. Guide: docs/learning.md."""
    for name, value, known in (("dtype", dtype, DTYPES), ("save-dtype", save_dtype, ("auto", *TYPES))):
        if value not in known:
            raise ConfigError(f"--{name} must be one of {', '.join(known)}, got {value!r}")
    if head not in HEADS:
        raise ConfigError(f"--head must be one of {', '.join(HEADS)}, got {head!r}")
    if bool(prompts) == (from_checkpoint is not None):
        raise ConfigError("give --prompts to train, or --from-checkpoint to write what a server learned; one of them")
    given = _given(context)
    if head != "none" and "draft" in given:
        raise ConfigError(f"--head {head} begins with a new head, and --draft with that of a folder; give one of them")
    _check_mode(given, writes=from_checkpoint is not None)
    _check_out(out)
    if json_out is not None and json_out.parent != out:  # that folder is made later
        check_writable(json_out, "--json")
    draft_folder = resolve_folder(draft, "draft")
    asks_target = from_checkpoint is None or "target" in given
    if not asks_target and ModelConfig.from_folder(draft_folder, may_be_head=True).is_head:
        raise ConfigError("--target is needed to write what a head learned: a head is read beside its target")
    target_folder = resolve_folder(target, "target") if asks_target else draft_folder
    with progress_bar() as progress, TemporaryDirectory(prefix="adaserve-head-") as new:
        progress("loading", 0, 1)
        from adaserve_jax.distill.offline import Models, load_online_draft, write_draft  # imports jax

        begins_with = None
        if head != "none":
            from adaserve_jax.distill.heads import write_new_eagle3, write_new_medusa

            draft_folder, begins_with = Path(new) / "head", f"a new {head} head"
            if head == "medusa":
                write_new_medusa(target_folder, draft_folder)
            else:
                write_new_eagle3(target_folder, draft_folder, config.seed)
        models = Models.find(target_folder, draft_folder, begins_with)
        if from_checkpoint is not None:
            params, noted = load_online_draft(models, from_checkpoint, draft_name, config, _type(dtype), progress)
            write_draft(params, models.draft_folder, out, save_dtype, progress)
            version = f", version {noted['version']}" if "version" in noted else ""
            served = target if asks_target or draft == "demo" else "TARGET"
            say(f"{out}: draft {draft_name!r} as it was learned{version}; {_how_to_serve(served, out)}")
            return
        state = out.with_name(f"{out.name}.training")
        _check_state(state, resume=resume)
        with _interrupts() as interrupts:
            run = _open(models, _read(prompts, format, models), config, dtype, progress, interrupts)
            if resume:
                run.load(state)
            finished = run.run(state, _say_epoch)
        if finished:
            try:
                write_draft(run.weights(), models.draft_folder, out, save_dtype, progress)
            except BaseException:
                run.save(state)
                raise
            shutil.rmtree(state, ignore_errors=True)
    _print(run.done.evaluations)
    if not finished:
        say(
            f"stopped after {run.done.rounds} of {run.num_rounds} rounds, kept in {state}; to go on: "
            f"{resume_command(sys.argv[1:])}"
        )
        raise typer.Exit(INTERRUPTED_STATUS)
    _say_what_came(run, target, out)
    if json_out is not None:
        write_json(json_out, {
            "commit": source_commit(), "machine": machine_name(), "target": target, "draft": begins_with or draft,
            "prompts": prompts,
            "settings": asdict(config), "seconds": dict(run.done.seconds),
            "evaluations": [asdict(each) for each in run.done.evaluations],
        })  # fmt: skip


def _given(context: typer.Context) -> dict[str, str]:
    """Return parameters that stand on the command line, not in the environment, with the spelling of their options."""
    given = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name) if parameter.name else None
        if parameter.name and source is not None and source.name == "COMMANDLINE":
            given[parameter.name] = parameter.opts[0]
    return given


def _check_mode(given: dict[str, str], *, writes: bool) -> None:
    """Raise ConfigError for an option without effect. writes: with --from-checkpoint, which trains nothing."""
    for name, option in given.items():
        if writes and name not in OF_WRITING:
            raise ConfigError(f"{option} has no effect with --from-checkpoint, which trains nothing; leave it out")
        if not writes and name == "draft_name":
            raise ConfigError(f"{option} has no effect with --prompts; it goes with --from-checkpoint")


class _Interrupts:
    """Counter of Ctrl-C: the first asks for an end after the round, the second ends at once."""

    count = 0

    def __call__(self) -> bool:
        return self.count > 0

    def received(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        say("stopping; a round that is being learned is finished first; Ctrl-C again: at once, without it")


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.received)
    try:
        yield interrupts
    except KeyboardInterrupt:
        say("stopped at once; what was saved last is kept")
        raise typer.Exit(INTERRUPTED_STATUS) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _check_out(out: Path) -> None:
    """Raise ConfigError unless `out` is a folder that the finished draft can take the place of."""
    check_new(out)
    if not out.name or out.is_mount():
        raise ConfigError(f"--out must be a folder that can be replaced, got {out}; give one within it")


def _check_state(state: Path, *, resume: bool) -> None:
    if resume and not state.is_dir():
        raise ConfigError(f"--resume: expected the state of a run that was stopped in {state}, found nothing there")
    if state.exists() and not resume:
        raise ConfigError(f"{state} holds a run that was stopped; give --resume to go on with it, or remove it")


def _open(
    models: Models, prompts: list[list[int]], config: OfflineConfig, dtype: str, progress: Progress, stop: _Interrupts
) -> Distillation:
    from adaserve_jax.distill.offline import Prompts, open_distillation

    kept = Prompts.of(prompts, config, models.max_context)
    for count, why in ((kept.repeated, "repeated or empty"), (kept.too_long, "too long for the models' context")):
        if count:
            say(f"left out: {count} of {len(prompts)} prompts, {why}")
    return open_distillation(models, kept, config, _type(dtype), progress=progress, wants_stop=stop)


def _type(name: str) -> Any:
    import jax
    import jax.numpy as jnp

    from adaserve_jax.runtime.compile import use_compile_cache

    use_compile_cache(None)
    if name == "auto":
        name = "f32" if jax.local_devices()[0].platform == "cpu" else "bf16"
    return jnp.dtype(jnp.float32 if name == "f32" else jnp.bfloat16)


def _read(prompts: str, format: str, models: Models) -> list[list[int]]:
    """Return the token ids of each prompt. Raises RequestError: the target has no row for one of them."""
    found = _tokenised(prompts, format, models.tokenizer)
    for ids in found:
        check_ids(ids, models.target.vocab_size, "prompts")
    return found


def _tokenised(prompts: str, format: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of each prompt; a conversation ends where the answer begins."""
    from adaserve_jax.bench.local_client import encode_item  # imports jax

    if Path(prompts).suffix == ".txt" and format == AUTO:
        lines = read_text(Path(prompts), "prompts").splitlines()
        return [tokenizer.encode(line) for line in lines if line.strip()]
    workload = load_workload(None if prompts == PACKAGED else Path(prompts), format=format)
    items = [item for item in workload.items if not item.by_length]
    if not items:
        raise ConfigError(f"{prompts} has lengths of prompts only; give a file that has their texts")
    return [encode_item(tokenizer, item) for item in items]


def _say_epoch(found: Evaluation) -> None:
    what = "before training" if found.epoch == 0 else f"epoch {found.epoch}"
    say(f"{what}: held-out acceptance {found.acceptance:.4f}, loss {found.loss:.4f}", style="dim")


def _print(evaluations: Sequence[Evaluation]) -> None:
    """Print the table of evaluations to stdout."""
    headers = ("draft", "held-out acceptance", "held-out loss", "training loss", "steps", "tokens", "seconds")
    table = number_table(headers)
    for each in evaluations:
        table.add_row(
            "before" if each.epoch == 0 else f"epoch {each.epoch}", f"{each.acceptance:.4f}", f"{each.loss:.4f}",
            "" if each.training_loss is None else f"{each.training_loss:.4f}", str(each.steps), f"{each.tokens:,}",
            f"{each.seconds:.1f}",
        )  # fmt: skip
    if evaluations:
        table_console(table).print(table)


def _say_what_came(run: Distillation, target: str, out: Path) -> None:
    first, last = run.done.evaluations[0], run.done.evaluations[-1]
    if last.acceptance < first.acceptance:
        say("held-out acceptance fell: try a lower --rate, more prompts, or fewer --epochs", style="bold red")
    spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in run.done.seconds.items())
    say(f"{out}: {count_parameters(out):,} parameters; {spent}; {_how_to_serve(target, out)}")


def _how_to_serve(target: str, draft: Path) -> str:
    pair = ["--target", target] if target != "demo" else []
    return f"serve it with: {shlex.join(['adaserve', 'serve', *pair, '--draft', str(draft)])}"
