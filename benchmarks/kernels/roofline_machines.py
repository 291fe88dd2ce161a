"""Computes the machines that the simulator ships for accelerators: profiles from data sheets, marked as computed.

`python -m benchmarks.kernels.roofline_machines` writes adaserve_jax/sim/data/machines. It needs the compilers of the
extras `cuda-aot` and `tpu-aot`, which name the devices, but compiles nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from adaserve_jax.bench.roofline import Assumptions, computed_profile
from adaserve_jax.config import EngineConfig
from adaserve_jax.results.profile import write_profile
from adaserve_jax.runtime.absent_device import DEVICES
from adaserve_jax.runtime.absent_engine import plan_absent
from adaserve_jax.sim import machines
from benchmarks.kernels.model_shapes import write_shapes

FOLDER = Path(machines.__file__).parent / "data" / "machines"
ACCEPTANCE = 0.67
"""Mean over the classes of the packaged machines of the paper's shape; no roofline tells it."""
MACHINES = (
    ("a100x4-llama-70b", "a100", 4, "llama-70b", "llama-1b"),
    ("a100x2-qwen-32b", "a100", 2, "qwen-32b", "qwen-0.5b"),
    ("a100-qwen-7b", "a100", 1, "qwen-7b", "qwen-0.5b"),
    ("a100-llama-8b", "a100", 1, "llama-8b", "llama-1b"),
    ("h100-llama-8b", "h100", 1, "llama-8b", "llama-1b"),
    ("h100x4-llama-70b", "h100", 4, "llama-70b", "llama-1b"),
    ("v5ex8-llama-8b", "v5e", 8, "llama-8b", "llama-1b"),
    ("v6ex8-llama-70b", "v6e", 8, "llama-70b", "llama-1b"),
)
"""Name, device, number of devices, target and draft: the papers' set-ups, then current ones."""


def main() -> None:
    """Write every machine."""
    with tempfile.TemporaryDirectory() as root:
        shapes = write_shapes(Path(root))
        for name, device, tp, target, draft in MACHINES:
            config = EngineConfig(target=str(shapes[target]), draft=str(shapes[draft]), tp=tp)
            engine = plan_absent(config, DEVICES[device], elastic=True)
            engine.resolved.check_memory()
            profile = computed_profile(engine, name=name, acceptance=ACCEPTANCE, assumed=Assumptions())
            write_profile(FOLDER / f"{name}.json", profile)
            print(f"{name}: {profile.baseline_s * 1e3:.1f} ms per token alone")


if __name__ == "__main__":
    main()
