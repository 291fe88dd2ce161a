"""What this engine's times hold for: the machine, the device, the models and the settings that decide its programs."""

from __future__ import annotations

from pathlib import Path

import jax

from adaserve_jax.results.profile import Identity
from adaserve_jax.results.provenance import machine_name, model_hash
from adaserve_jax.runtime.resolve import Resolved

SETTINGS = ("dtype", "quantize", "deterministic", "tp", "num_processes")


def identify(resolved: Resolved, target_folder: Path, draft_folder: Path | None) -> Identity:
    """Of a resolved engine and the folders of its models."""
    config = resolved.config
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= {
        "attention": resolved.attention,
        "row_edges": list(resolved.verify_buckets.row_edges),
        "search_widths": list(resolved.search_widths),
    }
    return Identity(
        machine=machine_name(),
        device=device_name(config.tp),
        target=model_hash(target_folder),
        draft=None if draft_folder is None else model_hash(draft_folder),
        limits=resolved.limits,
        settings=settings,
    )


def device_name(tp: int) -> str:
    """Platform and kind of the first device, and how many hold the target."""
    device = jax.local_devices()[0]
    return f"{device.platform}: {device.device_kind}{f', {tp} devices' if tp > 1 else ''}"
