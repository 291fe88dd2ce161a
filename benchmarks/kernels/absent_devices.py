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

BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rope_theta": 5e5,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_act": "silu",
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "head_dim": 64, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}  # fmt: skip
"""Configurations of the sizes in which Llama 3 came."""
ENGINES = (
    ("h100", "8B", 1), ("h200", "8B", 1), ("a100", "8B", 1), ("l40s", "8B", 1),
    ("v5e", "8B", 4), ("v5p", "8B", 1), ("v6e", "8B", 1), ("tpu7x", "8B", 1),
    ("h100", "70B", 4), ("h200", "70B", 2), ("a100", "70B", 4), ("v5p", "70B", 4), ("v6e", "70B", 8),
    ("tpu7x", "70B", 4),
)  # fmt: skip
"""Device, target and number of devices; the draft is the 1B."""
LAYERS = 2


def folders(root: Path) -> dict[str, Path]:
    """Write a config.json for each shape, and nothing else."""
    found = {}
    for name, shape in SHAPES.items():
        found[name] = root / name
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps(BASE | shape))
    return found


def rows_of(device: str, target: str, tp: int, attention: str, shapes: dict[str, Path]) -> list[dict[str, Any]]:
    """Compile the largest program of each kind."""
    config = EngineConfig(target=str(shapes[target]), draft=str(shapes["1B"]), tp=tp, attention=attention)
    here = {"device": device, "target": target, "tp": tp, "attention": attention}
    try:
        engine = plan_absent(config, DEVICES[device], elastic=True, layers=LAYERS)
    except ConfigError as error:
        return [here | {"kind": "plan", "error": str(error)}]
    limits, ledger = engine.resolved.limits, engine.resolved.ledger()
    here |= {"pages": limits.num_pages, "requests": limits.num_pages // limits.max_pages_per_request,
             "context": limits.max_context, "fits": ledger.fits}  # fmt: skip
    return [here | asdict(program) for program in compile_absent(engine)]


def main(
    out: Annotated[Path, typer.Option(help="JSON file; what it holds is not compiled again")],
    devices: Annotated[str, typer.Option(help="devices, separated by commas; none: all")] = "",
) -> None:
    """Compile every engine whose compiler is installed, and write the file after each."""
    found = json.loads(out.read_text()) if out.exists() else {"rows": []}
    done = {(row["device"], row["target"], row["tp"], row["attention"]) for row in found["rows"]}
    with tempfile.TemporaryDirectory() as root:
        shapes = folders(Path(root))
        for device, target, tp in ENGINES:
            wanted = not devices or device in devices.split(",")
            for attention in ("xla", "mosaic"):
                if not wanted or (device, target, tp, attention) in done or missing_compiler(DEVICES[device].platform):
                    continue
                rows = rows_of(device, target, tp, attention, shapes)
                found["rows"] += rows
                found |= {"commit": source_commit(), "machine": machine_name(), "jax_version": jax.__version__,
                          "layers": LAYERS}  # fmt: skip
                write_whole(out, json.dumps(found, indent=1) + "\n", mode=SHARED)
                failed = [f"{row['kind']}: {row['error']}" for row in rows if row.get("error")]
                print(device, target, tp, attention, f"{len(rows)} programs", *failed, sep="; ", flush=True)


if __name__ == "__main__":
    typer.run(main)
