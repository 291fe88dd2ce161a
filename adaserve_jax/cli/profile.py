"""`adaserve profile`: measures the times of steps into a file that engines and simulations start from.

With `--device` it compiles the engine for a device that is not here, and computes the times.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from adaserve_jax.cli.options import takes
from adaserve_jax.cli.terminal import check_writable, number_table, progress_bar, say, table_console
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import MIB, Ledger, Workspace
from adaserve_jax.results.profile import Profile, write_profile
from adaserve_jax.scheduler.policies import policy_of
from adaserve_jax.workloads.traces import load_trace

if TYPE_CHECKING:
    from adaserve_jax.runtime.absent_engine import CompiledProgram


def write_ledger(path: Path, ledger: Ledger) -> None:
    """Write the ledger as JSON, in bytes: parts by layout, the limit, sizes of pages and workspace.

    Raises ConfigError: it cannot be written.
    """
    layouts = {
        title: [asdict(part) for part in ledger.parts(expanded=expanded)]
        for title, expanded in _layouts(ledger).items()
    }
    report: dict[str, Any] = {
        "kind": "adaserve ledger",
        "fits": ledger.fits,
        "limit": asdict(ledger.limit),
        "layouts": layouts,
        "num_pages": ledger.num_pages,
        "extension_pages": ledger.extension_pages,
        "target_page_bytes": ledger.sizes.target_page,
        "draft_page_bytes": ledger.sizes.draft_page,
        "reserve_bytes": ledger.sizes.reserve,
        "workspace_bytes_by_tokens": (ledger.workspace.by_tokens or None) if ledger.workspace is not None else None,
    }
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from error


def _layouts(ledger: Ledger) -> dict[str, bool]:
    """Return the layouts by title, and whether the draft is away in each."""
    layouts = {"draft resident" if ledger.sizes.draft_weights else "without a draft": False}
    return layouts | ({"draft away, pages in its place": True} if ledger.extension_pages else {})


def _memory_table(ledger: Ledger, title: str, expanded: bool) -> Table:
    table = number_table(("part", "device, MiB", "host, MiB", "share of limit"), title=title)
    parts = ledger.parts(expanded=expanded)
    for part in parts:
        table.add_row(
            part.name, _mib(part.device_bytes), _mib(part.host_bytes), _share(ledger.counted(part), ledger)
        )  # fmt: skip
    table.add_section()
    sums = (sum(part.device_bytes for part in parts), sum(part.host_bytes for part in parts))
    table.add_row("all", *(_mib(each) for each in sums), _share(ledger.taken(expanded=expanded), ledger))
    return table


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}" if size else ""


def _share(size: int, ledger: Ledger) -> str:
    return f"{size / ledger.limit.bytes:.1%}"


CHECK_SECONDS = 30.0
UNUSED = ("profile", "eq8_c1", "eq9_c2", "infeasible_slo", "calibrate", "calibration")
"""Options of the engine that change no measurement."""


@takes("config", EngineConfig, without=UNUSED)
def profile(
    config: EngineConfig,
    out: Annotated[Path | None, typer.Option(help="JSON file to write; none: only with --memory")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="show what weights, KV pages and programs take, and measure nothing")
    ] = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="with --memory: compile the programs, which takes minutes, to know their part"),
    ] = False,
    name: Annotated[str, typer.Option(help="what a simulation calls this machine; none: the target's folder")] = "",
    check_seconds: Annotated[
        float, typer.Option(help="seconds of a mixed load that predictions are held against; 0: none")
    ] = CHECK_SECONDS,
    acceptance: Annotated[
        float, typer.Option(help="chance that the target takes the draft's first choice; 0: as the mixed load shows")
    ] = 0.0,
    search: Annotated[bool, typer.Option("--search", help="search c1 and c2 of eq. 8 and 9 in the simulator")] = False,
    trace: Annotated[
        list[Path] | None, typer.Option(help="trace to search on, may be given again; none: generated ones")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="image of the roofline to write too, .png or .svg")] = None,
    device: Annotated[
        str,
        typer.Option(
            help="compile for this device, which need not be here, and compute times instead of measuring: h100, h200, "
            "a100, l40s, v5e, v5p, v6e or tpu7x; --tp of them. Models need no weights, only config.json"
        ),
    ] = "",
    programs: Annotated[
        Literal["largest", "all", "none"],
        typer.Option(help="with --device: programs to compile, the largest of each kind, all, or none"),
    ] = "largest",
    layers: Annotated[
        int, typer.Option(min=0, help="with --device: layers to compile, which stand for all; 0: every layer")
    ] = 2,
) -> None:
    """Measure draft and verify times at every size, depth and context; propose budgets. File: docs/profile.md."""
    if check_seconds < 0 or not 0 <= acceptance < 1:
        raise ConfigError("--check-seconds must not be below 0, and --acceptance must be from 0 to below 1")
    check_writable(out, "--out")
    check_writable(plot, "--plot")
    if trace and not search:
        raise ConfigError("--trace is what --search simulates; give both, or leave it out")
    if not device and (programs != "largest" or layers != 2):
        raise ConfigError("--programs and --layers are about --device; give it too, or leave them out")
    if device:
        if memory or exact or search or trace or plot is not None or check_seconds != CHECK_SECONDS:
            raise ConfigError(
                "--device measures nothing; leave out --memory, --exact, --search, --trace, --plot and --check-seconds"
            )
        return profile_absent(config, device, out, name, acceptance or None, programs, layers)
    if memory:
        if search or acceptance or name or plot is not None or check_seconds != CHECK_SECONDS:
            raise ConfigError(
                "--memory measures nothing; leave out --search, --acceptance, --name, --plot and --check-seconds"
            )
        return _show_memory(config, out, exact=exact)
    if exact:
        raise ConfigError("--exact is about --memory; give both, or leave it out")
    if out is None:
        raise ConfigError("--out must name the JSON file to write; only --memory does without")
    if search and (config.draft is None or not (check_seconds or acceptance)):
        raise ConfigError("--search needs a draft, and --check-seconds or --acceptance: it simulates what is accepted")
    traces = [load_trace(path) for path in trace or ()]
    if plot is not None:
        from adaserve_jax.bench.profile_plot import need_matplotlib, plot_profile

        need_matplotlib(plot)
    with progress_bar() as progress:
        progress("loading", 0, 1)
        from adaserve_jax.bench.profile import measure_profile, with_offsets  # imports jax

        measured = measure_profile(
            config, name=name, check_s=check_seconds, acceptance=acceptance or None, progress=progress
        )
        write_profile(out, measured)  # a search that fails must not cost the measurement
        if search:
            measured = with_offsets(measured, out, traces, progress)
            write_profile(out, measured)
    _print(measured)
    if plot is not None:
        plot_profile(measured, plot)
    written = ", ".join(str(path) for path in (out, plot) if path is not None)
    say(f"written: {written}", style="dim")


def _show_memory(config: EngineConfig, out: Path | None, *, exact: bool) -> None:
    """Show the ledger of an engine without measuring. Raises ConfigError if it does not fit."""
    elastic = policy_of(config).elastic
    with progress_bar() as progress:
        from adaserve_jax.runtime.loading import plan_memory, plan_shapes  # imports jax

        if exact:
            resolved, workspace = plan_memory(config, progress, elastic=elastic)
        else:
            _, resolved = plan_shapes(config, elastic=elastic)
            workspace = Workspace(resolved.sizes.reserve)
    ledger = resolved.ledger(workspace)
    tables = [_memory_table(ledger, title, expanded) for title, expanded in _layouts(ledger).items()]
    console, limit = table_console(*tables), ledger.limit
    console.print(*tables)
    host = "; copies on the host count too" if limit.covers_host else ""
    console.print(f"limit {limit.bytes / MIB:,.1f} MiB: {limit.source}{host}", soft_wrap=True)
    if resolved.weight_format:
        console.print(f"weights of the target: {resolved.weight_format}", soft_wrap=True, highlight=False)
    if resolved.draft_vocabulary:
        console.print(f"draft of another vocabulary: {resolved.draft_vocabulary}", soft_wrap=True, highlight=False)
    if not exact:
        say("workspace is estimated from shapes; --exact compiles the programs to know it", style="dim")
    if out is not None:
        write_ledger(out, ledger)
    resolved.check_memory(workspace)


def profile_absent(
    config: EngineConfig, name_of_device: str, out: Path | None, name: str, acceptance: float | None,
    programs: Literal["largest", "all", "none"], layers: int,
) -> None:  # fmt: skip
    """Compile an engine for a device that is not here; show what its compiler says, the ledger and computed times.

    Raises ConfigError: the engine does not fit the device, or a program does not compile; all is shown before.
    """
    with progress_bar() as progress:
        progress("planning", 0, 1)
        from adaserve_jax.bench.roofline import Assumptions, computed_profile  # imports jax
        from adaserve_jax.runtime.absent_device import device_named
        from adaserve_jax.runtime.absent_engine import compile_absent, plan_absent

        engine = plan_absent(config, device_named(name_of_device), elastic=policy_of(config).elastic, layers=layers)
        compiled = (
            [] if programs == "none" else compile_absent(engine, every_bucket=programs == "all", progress=progress)
        )
        computed = computed_profile(engine, name=name, acceptance=acceptance, assumed=Assumptions())
    ledger = engine.resolved.ledger()
    tables = [_memory_table(ledger, title, expanded) for title, expanded in _layouts(ledger).items()]
    if compiled:
        tables.insert(0, _programs_table(compiled, f"programs for {engine.device.title}, {layers or 'all'} layers"))
    console = table_console(*tables)
    console.print(*tables)
    console.print(f"limit {ledger.limit.bytes / MIB:,.1f} MiB: {ledger.limit.source}", soft_wrap=True)
    limits = engine.resolved.limits
    console.print(
        f"{limits.num_pages} pages of {limits.page_size} tokens: {limits.num_pages // limits.max_pages_per_request} "
        f"requests of {limits.max_context} tokens at once",
        soft_wrap=True,
    )
    _print(computed)
    assumed = ", ".join(f"{each} {value:g}" for each, value in (computed.computed or {}).items())
    console.print(f"computed, not measured, from {assumed}", soft_wrap=True)
    if out is not None:
        write_profile(out, computed)
        say(f"written: {out}", style="dim")
    engine.resolved.check_memory()
    failed = [each for each in compiled if each.error is not None]
    if failed:
        raise ConfigError(f"{failed[0].kind} does not compile for {engine.device.title}: {failed[0].error}")


ON_GPU = {"launches": "launches", "kernels": "kernels", "registers": "registers", "shared, bytes": "shared_bytes",
          "spilled, bytes": "spilled_bytes"}  # fmt: skip
ON_TPU = {"VMEM, bytes": "vmem_bytes", "SMEM, bytes": "smem_bytes"}
"""Columns of figures that only GPUs or only TPUs have, and the fields of CompiledProgram."""


def _programs_table(compiled: list[CompiledProgram], title: str) -> Table:
    own = ON_TPU if any(each.vmem_bytes is not None for each in compiled) else ON_GPU
    headers = ("program", "shape", "arguments, MiB", "of them counted", "temporary, MiB", "in place, MiB",
               "copies of a pool", "exchanged, MiB", *own, "compiled in, s")  # fmt: skip
    table = number_table(headers, texts=2, title=title)
    for each in compiled:
        if each.error is not None:
            table.add_row(each.kind, each.shape, "does not compile", *[""] * (5 + len(own)), f"{each.seconds:.1f}")
            continue
        counted = "" if each.ledger_bytes is None else f"{each.ledger_bytes / max(1, each.argument_bytes):.1%}"
        table.add_row(
            each.kind, each.shape, _mib(each.argument_bytes), counted, _mib(each.temporary_bytes),
            _mib(each.alias_bytes), str(each.pool_copies), _mib(sum(each.collectives.values())),
            *("" if (figure := getattr(each, name)) is None else f"{figure:,}" for name in own.values()),
            f"{each.seconds:.1f}",
        )  # fmt: skip
    return table


def _print(measured: Profile) -> None:
    """Print the profile to stdout."""
    tables = (_verify_table(measured), _draft_table(measured), _proposal_table(measured))
    console = table_console(*tables)
    console.print(*tables)
    console.print(f"baseline {measured.baseline_s * 1e3:.2f} ms per token", soft_wrap=True)
    if measured.acceptance is not None:
        console.print(f"acceptance of the draft's first choice: {measured.acceptance:.2f}", soft_wrap=True)
    elif measured.identity.limits.max_depth:
        console.print(
            "acceptance is not known: proposed is no draft, and `adaserve simulate` refuses this profile; measure "
            "with more --check-seconds, or give --acceptance",
            soft_wrap=True,
        )
    if measured.c1 is not None:
        console.print(f"eq. 8 and 9: c1 = {measured.c1}, c2 = {measured.c2}", soft_wrap=True)
    for kind, error in (measured.errors or {}).items():
        if error["steps"]:
            shares = f"{error['median']:.1%} median, {error['p90']:.1%} at the 90th percentile"
            console.print(f"error of predicted {kind} time: {shares}, {error['steps']} steps", soft_wrap=True)


def _verify_table(measured: Profile) -> Table:
    timed = measured.timings.verify
    contexts = sorted({context for _, _, context in timed})
    table = number_table(["tokens", "rows", *map(str, contexts)], texts=0, title="verify, ms by context")
    for tokens, rows in sorted({(tokens, rows) for tokens, rows, _ in timed}):
        table.add_row(str(tokens), str(rows), *(_ms(timed.get((tokens, rows, c))) for c in contexts))
    return table


def _draft_table(measured: Profile) -> Table:
    timed = measured.timings.search
    depths = sorted({depth for _, _, depth, _ in timed})
    table = number_table(["rows", "width", "context", *map(str, depths)], texts=0, title="draft, ms by depth")
    for rows, width, context in sorted({(rows, width, context) for rows, width, _, context in timed}):
        times = (_ms(timed.get((rows, width, depth, context))) for depth in depths)
        table.add_row(str(rows), str(width), str(context), *times)
    return table


def _proposal_table(measured: Profile) -> Table:
    headers = ["requests", "knee, tokens", "budget", "depth", "width", "expected tokens/s", "without draft"]
    table = number_table(headers, texts=0, title="proposed")
    by_rows: list[dict[str, Any]] = (measured.proposal or {}).get("by_rows", [])
    for each in by_rows:
        table.add_row(
            str(each["rows"]), f"{each['knee']:.0f}", str(each["budget"]), str(each["depth"]), str(each["width"]),
            f"{each['tokens_per_s']:.1f}", f"{each['plain_tokens_per_s']:.1f}",
        )  # fmt: skip
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
