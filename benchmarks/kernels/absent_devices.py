"""Compiles engines of known shapes for devices that are not here: one row per device, pair and program.

`python -m benchmarks.kernels.absent_devices --out absent-devices.json` adds what the file lacks, so that it can be
stopped and continued. It runs without weights; two layers stand for all. The page docs/howto/gpu-and-tpu.md shows it.
"""

from __future__ import annotations

import json
import tempfile
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
from benchmarks.kernels.model_shapes import write_shapes

ENGINES = (
    ("h100", "llama-8b", 1), ("h200", "llama-8b", 1), ("a100", "llama-8b", 1), ("l40s", "llama-8b", 1),
    ("v5e", "llama-8b", 4), ("v5p", "llama-8b", 1), ("v6e", "llama-8b", 1), ("tpu7x", "llama-8b", 1),
    ("h100", "llama-70b", 4), ("h200", "llama-70b", 2), ("a100", "llama-70b", 4), ("v5p", "llama-70b", 4),
    ("v6e", "llama-70b", 8), ("tpu7x", "llama-70b", 4),
)  # fmt: skip
"""Device, target and number of devices; the draft is llama-1b."""
LAYERS = 2


def rows_of(device: str, target: str, tp: int, attention: str, shapes: dict[str, Path]) -> list[dict[str, Any]]:
    """Compile the largest program of each kind."""
    config = EngineConfig(target=str(shapes[target]), draft=str(shapes["llama-1b"]), tp=tp, attention=attention)
    here = {"device": device, "target": target, "tp": tp, "attention": attention}
    try:
        engine = plan_absent(config, DEVICES[device], elastic=True, layers=LAYERS)
    except ConfigError as error:
        return [here | {"kind": "plan", "error": str(error)}]
    limits, ledger = engine.resolved.limits, engine.resolved.ledger()
    here |= {"pages": limits.num_pages, "requests": limits.num_pages // limits.max_pages_per_request,
             "context": limits.max_context, "fits": ledger.fits, "chosen": engine.resolved.attention,
             "chosen_by_draft": engine.resolved.draft_attention}  # fmt: skip
    return [here | asdict(program) for program in compile_absent(engine)]


def main(
    out: Annotated[Path, typer.Option(help="JSON file; what it holds is not compiled again")],
    devices: Annotated[str, typer.Option(help="devices, separated by commas; none: all")] = "",
) -> None:
    """Compile every engine whose compiler is installed, and write the file after each."""
    found = json.loads(out.read_text()) if out.exists() else {"rows": []}
    done = {(row["device"], row["target"], row["tp"], row["attention"]) for row in found["rows"]}
    with tempfile.TemporaryDirectory() as root:
        shapes = write_shapes(Path(root))
        for device, target, tp in ENGINES:
            wanted = not devices or device in devices.split(",")
            for attention in ("auto", "xla"):
                if not wanted or (device, target, tp, attention) in done or missing_compiler(DEVICES[device].platform):
                    continue
                same = {"device": device, "target": target, "tp": tp, "attention": "auto", "chosen": "xla"}
                if attention == "xla" and any(same.items() <= row.items() for row in found["rows"]):
                    continue  # auto has compiled it
                rows = rows_of(device, target, tp, attention, shapes)
                found["rows"] += rows
                found |= {"commit": source_commit(), "machine": machine_name(), "jax_version": jax.__version__,
                          "layers": LAYERS}  # fmt: skip
                write_whole(out, json.dumps(found, indent=1) + "\n", mode=SHARED)
                failed = [f"{row['kind']}: {row['error']}" for row in rows if row.get("error")]
                print(device, target, tp, attention, f"{len(rows)} programs", *failed, sep="; ", flush=True)


if __name__ == "__main__":
    typer.run(main)
