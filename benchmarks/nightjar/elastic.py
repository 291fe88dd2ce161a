"""What it costs to exchange the draft for KV pages and back, beside the device's own time to copy the same bytes.

    python -m benchmarks.nightjar.elastic --out elastic.json [--params 110M | --target CHECKPOINT --draft CHECKPOINT]

Each round expands, verifies on the extended pools, moves half of the extension's pages to random pages of the base,
contracts, and waits for the draft; before that it copies the KV cache, and as many bytes as the moved pages have, so
that what else runs on the machine meets both alike. Copies write into memory that is there already. No request is
served, so this says nothing of what the draft's KV costs to compute again, nor of what a swap brings.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax
from rich.console import Console
from rich.table import Table

from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, GrownShape, grow
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.warmup import Effort, measure
from benchmarks import program
from benchmarks.grown import shape_of

DRAFT_SHAPES = {
    "110M": GrownShape(layers=5, hidden=384, heads=6, kv_heads=2, mlp=1536),
    "1B": GrownShape(layers=12, hidden=768, heads=12, kv_heads=4, mlp=3072),
    "8B": GrownShape(layers=16, hidden=2048, heads=32, kv_heads=8, mlp=8192),
}
"""About a tenth of each size of a target, as its draft."""
STEP = Effort((512,), passes=1, repeats=3, repeats_beyond=0, all_depths=False)
AIMS = {"expansion": 0.1, "contraction": 1.3}
"""Largest multiples of copying the KV cache, and the migrated pages."""
DISPATCH_AIM_S = 1e-3


@dataclass
class Swaps:
    """Seconds of every round by what was timed, and the bytes of what was exchanged.

    expand: draft freed, slab made. move: pages copied to the base. contract: the call alone, which begins to load the
    draft; draft_ready: the longest call of it while the draft loads. reload: from contract to the draft being there.
    copy_cache, copy_pages: the device's copy of the base pool, and of as many bytes as were moved.
    verify, verify_extended: least seconds of a step by "tokens x rows", without and with an extension.
    """

    base_pages: int
    extension_pages: int
    moved_pages: int
    page_bytes: int
    draft_weight_bytes: int
    draft_pool_bytes: int
    compiles_after_ready: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    verify: dict[str, float] = field(default_factory=dict)
    verify_extended: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, run: Callable[[], Any]) -> Any:
        """Run, wait for what it gives, and keep how long both took."""
        started = time.perf_counter()
        result = jax.block_until_ready(run())
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    def middle(self, *names: str) -> float:
        """Median over rounds of the sum of these."""
        return median(map(sum, zip(*(self.seconds[name] for name in names), strict=True)))

    @property
    def expansion(self) -> float:
        """Times copying the KV cache."""
        return self.middle("expand") / self.middle("copy_cache")

    @property
    def contraction(self) -> float:
        """Pages moved and the slab handed back: times copying the migrated pages."""
        return self.middle("move", "contract") / self.middle("copy_pages")

    @property
    def extended_step(self) -> dict[str, float]:
        """A step on extended pools, times one on pools that are not."""
        return {key: self.verify_extended[key] / seconds for key, seconds in self.verify.items()}

    def judged(self) -> dict[str, bool]:
        return {
            "expansion": self.expansion <= AIMS["expansion"],
            "contraction": self.contraction <= AIMS["contraction"],
            "dispatch": max(self.middle("contract"), self.middle("draft_ready")) <= DISPATCH_AIM_S,
        }


def measure_swaps(executor: ModelExecutor, rounds: int) -> Swaps:
    """Swap an executor that has warmed up there and back so many times."""
    elastic, drafter, limits = executor.elastic, executor.local_drafter, executor.limits
    assert elastic is not None and drafter is not None
    target, draft = executor.target, drafter.model
    moved = max(1, min(limits.extension_pages // 2, limits.num_pages))
    swaps = Swaps(
        base_pages=limits.num_pages, extension_pages=limits.extension_pages, moved_pages=moved,
        page_bytes=_size(target.pools) // limits.num_pages, draft_weight_bytes=_size(draft.params),
        draft_pool_bytes=_size(draft.pools),
    )  # fmt: skip
    copies = {"copy_cache": _copier(target.pools.k, limits.num_pages), "copy_pages": _copier(target.pools.k, moved)}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name, copy in copies.items():
            swaps.note(name, copy)
        _keep_least(swaps.verify, executor)
        swaps.note("expand", executor.expand)
        _keep_least(swaps.verify_extended, executor)
        sources = limits.num_pages + rng.permutation(limits.extension_pages)[:moved]
        targets = rng.permutation(limits.num_pages)[:moved]
        swaps.note("move", lambda sources=sources, targets=targets: executor.move_pages(sources, targets))
        swaps.note("reload", lambda: _reload(swaps, executor))
    swaps.compiles_after_ready = executor.compiles_after_ready
    return swaps


def _reload(swaps: Swaps, executor: ModelExecutor) -> None:
    swaps.note("contract", executor.contract)
    longest, ready = 0.0, False
    while not ready:
        time.sleep(1e-4)  # a step does more than ask
        started = time.perf_counter()
        ready = executor.draft_ready()
        longest = max(longest, time.perf_counter() - started)
    swaps.seconds.setdefault("draft_ready", []).append(longest)


def _copier(like: jax.Array, pages: int) -> Callable[[], Any]:
    """Copies K and V of so many pages, all layers, into memory that has been written before."""
    shape = (pages, like.shape[0], *like.shape[2:])

    def copied(into: jax.Array, source: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(into, source, 0, axis=0)

    compiled = jax.jit(copied, donate_argnums=0)
    sources = [jnp.ones(shape, like.dtype) for _ in range(2)]
    # One page more, so that there is something to keep and the copy is a copy.
    into = [compiled(jnp.zeros((pages + 1, *shape[1:]), like.dtype), source) for source in sources]

    def copy() -> list[jax.Array]:
        into[:] = [compiled(old, source) for old, source in zip(into, sources, strict=True)]
        return into

    return copy


def _keep_least(least: dict[str, float], executor: ModelExecutor) -> None:
    """Of the seconds of every verify program, in the layout that is in force."""
    for (tokens, rows, _), seconds in measure(executor, STEP).verify.items():
        key = f"{tokens} x {rows}"
        least[key] = min(seconds, least.get(key, seconds))


def _size(arrays: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def show_swaps(swaps: Swaps, console: Console) -> None:
    console.print(
        f"{swaps.base_pages} + {swaps.extension_pages} pages of {swaps.page_bytes / 2**20:.2f} MiB, "
        f"{swaps.moved_pages} moved; {swaps.compiles_after_ready} compilations",
        highlight=False,
    )
    table = Table("median", "ms")
    for name, seconds in swaps.seconds.items():
        table.add_row(name, f"{median(seconds) * 1e3:.3f}")
    console.print(table)
    met = swaps.judged()
    for name, limit in AIMS.items():
        console.print(f"{name}: {getattr(swaps, name):.3f} times the copy, aim {limit}: {_word(met[name])}")
    console.print(f"reload dispatch: aim {DISPATCH_AIM_S * 1e3:.0f} ms: {_word(met['dispatch'])}")
    ratios = ", ".join(f"{key}: {ratio:.3f}" for key, ratio in swaps.extended_step.items())
    console.print(f"a step on extended pools, times one on others, by tokens x rows: {ratios}", highlight=False)


def _word(met: bool) -> str:
    return "met" if met else "missed"


def run_swaps(config: EngineConfig, rounds: int) -> tuple[Swaps, str]:
    """Load the pair, compile, swap, free all again. Returns the type of weights too, by name."""
    executor = load_executor(config)
    try:
        with progress_bar() as progress:
            executor.warm_up(progress)
        return measure_swaps(executor, rounds), executor.resolved.dtype.name
    finally:
        executor.close()


def as_result(swaps: Swaps) -> dict[str, Any]:
    """For JSON: what was measured, and how it stands to the aims."""
    return asdict(swaps) | {
        "ratios": {name: getattr(swaps, name) for name in (*AIMS, "extended_step")},
        "aims": AIMS | {"dispatch_s": DISPATCH_AIM_S},
        "met": swaps.judged(),
    }


def config_of(target: str, draft: str, dtype: str, num_pages: int = 256) -> EngineConfig:
    """Few programs: what a swap takes does not depend on them."""
    return EngineConfig(
        target=target, draft=draft, dtype=dtype, elastic="on", num_pages=num_pages, max_requests=8, max_context=1024,
        token_edges=(8, 64), row_edges=(8,), max_tree_tokens=64, max_depth=2, max_width=1,
    )  # fmt: skip


def _grown(role: Literal["target", "draft"], shape: GrownShape, dtype: str, scratch: str) -> str:
    """The demo pair's model of this role, grown."""
    folder = Path(scratch) / role
    grow(resolve_folder("demo", role), folder, shape, dtype=dtype)
    return str(folder)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    params: Annotated[str, typer.Option(help=f"size of the pair that is grown: {', '.join(SHAPES)}")] = "110M",
    target: Annotated[str, typer.Option(help="checkpoint folder of a target to measure instead")] = "",
    draft: Annotated[str, typer.Option(help="checkpoint folder of a draft to measure instead")] = "",
    dtype: Annotated[str, typer.Option(help="f32, bf16 or auto")] = "auto",
    num_pages: Annotated[int, typer.Option(help="pages of the base pool")] = 256,
    rounds: Annotated[int, typer.Option(help="swaps there and back")] = 7,
) -> None:
    """Measure swaps."""
    shape = shape_of(params)
    stored = "f32" if dtype == "auto" else dtype
    with tempfile.TemporaryDirectory() as scratch:
        target = target or _grown("target", shape, stored, scratch)
        draft = draft or _grown("draft", DRAFT_SHAPES[params], stored, scratch)
        swaps, dtype = run_swaps(config_of(target, draft, dtype, num_pages), rounds)
        sizes = {"target": count_parameters(Path(target)), "draft": count_parameters(Path(draft))}
    result = {
        "command": shlex.join(
            ["python", "-m", "benchmarks.nightjar.elastic", *(w.replace(str(out), out.name) for w in sys.argv[1:])]
        ),
        "commit": source_commit(), "machine": machine_name(), "device": jax.local_devices()[0].device_kind,
        "jax_version": jax.__version__, "params": sizes, "dtype": dtype, "swaps": as_result(swaps),
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    show_swaps(swaps, Console(width=120))


if __name__ == "__main__":
    program.run(main)
