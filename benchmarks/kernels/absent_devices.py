"""Compiles engines of known shapes for devices that are not here: one row per device, pair and program.

`python -m benchmarks.kernels.absent_devices --out absent-devices.json` adds what the file lacks, so that it can be
stopped and continued. `--again commit` compiles one kind of program again, in every engine, after a change to it. It
runs without weights; two layers stand for all, and `--deep` compiles one engine with all layers, to compare its
workspace with the reserve for it. The page docs/howto/gpu-and-tpu.md shows the file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.whole_file import SHARED, write_whole
from adaserve_jax.runtime.absent_device import DEVICES, missing_compiler
from adaserve_jax.runtime.absent_engine import compile_absent, plan_absent
from adaserve_jax.runtime.resample import EditShapes
from benchmarks.kernels.model_shapes import write_shapes

ENGINES = (
    ("h100", "llama-8b", 1), ("h200", "llama-8b", 1), ("a100", "llama-8b", 1), ("l40s", "llama-8b", 1),
    ("v5e", "llama-8b", 4), ("v5p", "llama-8b", 1), ("v6e", "llama-8b", 1), ("tpu7x", "llama-8b", 1),
    ("h100", "llama-70b", 4), ("h200", "llama-70b", 2), ("a100", "llama-70b", 4), ("v5p", "llama-70b", 4),
    ("v6e", "llama-70b", 8), ("tpu7x", "llama-70b", 4),
)  # fmt: skip
"""Device, target and number of devices; the draft is llama-1b."""
LAYERS = 2
DEEP = ("h100", "llama-8b", 1)
"""The engine whose programs are compiled with all layers."""


def rows_of(
    device: str, target: str, tp: int, attention: str, shapes: dict[str, Path], *, layers: int = LAYERS,
    kinds: Collection[str] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Compile the largest program of each kind. layers: 0: all. kinds: none: all."""
    config = EngineConfig(target=str(shapes[target]), draft=str(shapes["llama-1b"]), tp=tp, attention=attention)
    here = {"device": device, "target": target, "tp": tp, "attention": attention}
    try:
        engine = plan_absent(config, DEVICES[device], elastic=True, layers=layers)
    except ConfigError as error:
        return [here | {"kind": "plan", "error": str(error)}]
    resolved = engine.resolved
    limits, ledger = resolved.limits, resolved.ledger()
    here |= {"pages": limits.num_pages, "requests": limits.num_pages // limits.max_pages_per_request,
             "context": limits.max_context, "fits": ledger.fits, "chosen": resolved.attention,
             "chosen_by_draft": resolved.draft_attention, "commit": source_commit()}  # fmt: skip
    if not layers:
        edits = EditShapes(resolved.verify_buckets, engine.pair.target.vocab_size, limits.max_context)
        here |= {"layers": engine.pair.target.num_layers, "reserve_bytes": resolved.sizes.reserve,
                 "kept_bytes": edits.bytes(resolved.verify_buckets.token_edges[-1])}  # fmt: skip
    return [here | asdict(program) for program in compile_absent(engine, kinds=kinds)]


def again(rows: list[dict[str, Any]], kinds: Collection[str], shapes: dict[str, Path]) -> list[dict[str, Any]]:
    """Return an engine's rows with those of some kinds measured anew; all as they were if this commit measured them."""
    old = [row for row in rows if row["kind"] in kinds and row.get("commit") != source_commit()]
    if not old:
        return rows
    first = rows[0]
    new = rows_of(first["device"], first["target"], first["tp"], first["attention"], shapes,
                  kinds=[row["kind"] for row in old])  # fmt: skip
    by_kind = {row["kind"]: row for row in new}
    return [by_kind.get(row["kind"], row) for row in rows]


def main(
    out: Annotated[Path, typer.Option(help="JSON file; what it holds is not compiled again")],
    devices: Annotated[str, typer.Option(help="devices, separated by commas; none: all")] = "",
    repeat: Annotated[
        str, typer.Option("--again", help="kinds of programs to compile again, separated by semicolons; 'all': all")
    ] = "",
    deep: Annotated[bool, typer.Option("--deep", help="compile one engine with all layers, and nothing else")] = False,
) -> None:
    """Compile every engine whose compiler is installed, and write the file after each."""
    found = json.loads(out.read_text()) if out.exists() else {"rows": []}
    engines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        engines.setdefault((row["device"], row["target"], row["tp"], row["attention"]), []).append(row)

    def keep() -> None:
        rows = [row for each in engines.values() for row in each]
        about = {"machine": machine_name(), "jax_version": jax.__version__, "layers": LAYERS}
        write_whole(out, json.dumps(found | about | {"rows": rows}, indent=1) + "\n", mode=SHARED)

    def say(key: tuple[Any, ...], rows: list[dict[str, Any]]) -> None:
        failed = [f"{row['kind']}: {row['error']}" for row in rows if row.get("error")]
        print(*key, f"{len(rows)} programs", *failed, sep="; ", flush=True)

    with tempfile.TemporaryDirectory() as root:
        shapes = write_shapes(Path(root))
        if deep:
            found["deep"] = rows_of(*DEEP, "auto", shapes, layers=0)
            keep()
            return say(DEEP, found["deep"])
        for engine in ENGINES:
            device, target, tp = engine
            if (devices and device not in devices.split(",")) or missing_compiler(DEVICES[device].platform):
                continue
            for attention in ("auto", "xla"):
                key = (device, target, tp, attention)
                if key in engines and repeat:
                    kinds = [row["kind"] for row in engines[key]] if repeat == "all" else repeat.split(";")
                    engines[key] = again(engines[key], kinds, shapes)
                elif key in engines or (attention == "xla" and engines[*engine, "auto"][0].get("chosen") == "xla"):
                    continue  # done before, or auto has compiled it
                else:
                    engines[key] = rows_of(*key, shapes)
                keep()
                say(key, engines[key])


if __name__ == "__main__":
    typer.run(main)
