"""Reads `quantization_config` of config.json: which format the checkpoint has, or why it cannot be served."""

from __future__ import annotations

from typing import Any

from adaserve_jax.models.checkpoint_formats.encoding import Rule, WeightFormat
from adaserve_jax.models.checkpoint_formats.scaled import FLOAT8, Scaled
from adaserve_jax.models.settings import Settings

FORMAT_KEY = "quantization_config"
_ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_scale_inv", "k_scale", "v_scale")


def read_format(config: Settings) -> WeightFormat | None:
    """Return the format of the weights; None: full precision.

    Activations are never quantised: of a format that does so, the weights alone are read.
    Raises UnsupportedModelError, by the name of the setting: the format is not read; CheckpointError: it is malformed.
    """
    given = config.get(FORMAT_KEY)
    if not given:
        return None
    if not isinstance(given, dict):
        raise config.wrong(FORMAT_KEY, given, "an object")
    values = Settings(given, config.path, within=FORMAT_KEY)
    reader = _READERS.get(str(values.get("quant_method")))
    if reader is None:
        raise values.unsupported("quant_method", f"use a checkpoint in full precision, or one of {', '.join(_READERS)}")
    return reader(values)


def _fp8(values: Settings) -> WeightFormat:
    if values.get("fmt", "e4m3") != "e4m3":
        raise values.unsupported("fmt", "only 'e4m3' is")
    if values.get("expert_dtype", "fp8") != "fp8":
        raise values.unsupported("expert_dtype", "only 'fp8' is")
    block = values.get("weight_block_size")
    if block is not None and (len(found := _integers(block)) != 2 or min(found) < 1):
        raise values.wrong("weight_block_size", block, "two integers >= 1")
    scales = ("weight_scale_inv", "weight_scale") if block else ("weight_scale", "weight_scale_inv")
    encoding = Scaled(FLOAT8, None if block is None else (block[0], block[1]), scales)
    kept = _names(values, "modules_to_not_convert", "ignored_layers")
    of = "one scale for each matrix or row" if block is None else f"scales of blocks of {block[0]} x {block[1]}"
    return WeightFormat(f"fp8 with {of}", (Rule(encoding),), kept, _ACTIVATION_SCALES)


_READERS = {"fp8": _fp8}


def _integers(value: Any) -> tuple[int, ...]:
    """Return a list's integers; empty if it is not one of integers."""
    found = tuple(value) if isinstance(value, list | tuple) else ()
    return found if all(isinstance(each, int) for each in found) else ()


def _names(values: Settings, *keys: str) -> tuple[str, ...]:
    """Return the names that lists of modules hold together. Raises CheckpointError: another value stands there."""
    found: list[str] = []
    for key in keys:
        given = values.get(key) or []
        if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
            raise values.wrong(key, given, "a list of names of modules")
        found += given
    return tuple(found)
