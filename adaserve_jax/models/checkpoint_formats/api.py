"""Reads `quantization_config` of config.json: which format the checkpoint has, or why it cannot be served.

Checkpoints that ModelOpt exported may have a file beside it instead, `hf_quant_config.json`.
"""

from __future__ import annotations

import re
from typing import Any

from adaserve_jax.models.checkpoint_formats.encoding import Encoding, Rule, WeightFormat
from adaserve_jax.models.checkpoint_formats.fp4 import COMPRESSED_FP4, MODELOPT_FP4, NV_BLOCK, Mxfp4
from adaserve_jax.models.checkpoint_formats.packed import AWQ_ORDER, WORD_BITS, InputsFirst, OutputsFirst
from adaserve_jax.models.checkpoint_formats.scaled import FLOAT8, INT8, Scaled
from adaserve_jax.models.config_values import ConfigValues, read_json

FORMAT_KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
_NVFP4 = "nvfp4-pack-quantized"
_ACTIVATION_SCALES = (
    "input_scale", "activation_scale", "input_scale_inv", "input_zero_point", "output_scale", "output_zero_point",
    "k_scale", "v_scale", "input_global_scale",
)  # fmt: skip


def read_format(config: ConfigValues) -> WeightFormat | None:
    """Return the format of the weights; None: full precision.

    Activations are never quantised: of a format that does so, the weights alone are read.
    Raises UnsupportedModelError, by the name of the setting: the format is not read; CheckpointError: it is malformed.
    """
    given = config.get(FORMAT_KEY)
    if not given:
        beside = config.path.parent / MODELOPT_FILE
        return _modelopt(ConfigValues(read_json(beside), beside)) if beside.exists() else None
    if not isinstance(given, dict):
        raise config.wrong(FORMAT_KEY, given, "an object")
    values = config.inside(FORMAT_KEY, given)
    reader = _READERS.get(str(values.get("quant_method") or _producer(values)))
    if reader is None:
        raise values.unsupported("quant_method", f"use a checkpoint in full precision, or one of {', '.join(_READERS)}")
    return reader(values)


def _fp8(values: ConfigValues) -> WeightFormat:
    _one_of(values, "fmt", None, "e4m3", "float8_e4m3fn")
    _one_of(values, "expert_dtype", None, "fp8")
    block = None if values.get("weight_block_size") is None else _block(values, "weight_block_size")
    scales = ("weight_scale_inv", "weight_scale") if block else ("weight_scale", "weight_scale_inv")
    kept = _names(values, "modules_to_not_convert", "ignored_layers")
    of = "one scale for each matrix or row" if block is None else f"scales of blocks of {block[0]} x {block[1]}"
    return WeightFormat(f"fp8 with {of}", (Rule(Scaled(FLOAT8, block, scales)),), kept, _ACTIVATION_SCALES)


def _gptq(values: ConfigValues) -> WeightFormat:
    _one_of(values, "pack_dtype", None, "int32")
    named = "format" if values.get("checkpoint_format") is None else "checkpoint_format"
    version = _one_of(values, named, None, "gptq", "gptq_v2")
    if values.get("dynamic"):
        raise values.unsupported("dynamic", "every module must have the same bits and groups")
    bits, size = _one_of(values, "bits", 2, 4, 8), _group_size(values)
    encoding = InputsFirst(
        bits, size, along_inputs=True, order=tuple(range(WORD_BITS // bits)), zeros_less_one=version != "gptq_v2",
        any_order=bool(values.get("desc_act")) and size > 0,
    )  # fmt: skip
    title = f"GPTQ of {bits} bits with {_scales_of(size)}"
    return WeightFormat(title, (Rule(encoding),), zeros=("bias",))  # AutoGPTQ added biases to every module


def _awq(values: ConfigValues) -> WeightFormat:
    _one_of(values, "version", None, "gemm")
    _one_of(values, "zero_point", None, True)
    bits, size = _one_of(values, "bits", 4), _group_size(values)
    encoding = InputsFirst(bits, size, along_inputs=False, order=AWQ_ORDER)
    kept = _names(values, "modules_to_not_convert")
    return WeightFormat(f"AWQ of {bits} bits with {_scales_of(size)}", (Rule(encoding),), kept)


def _mxfp4(values: ConfigValues) -> WeightFormat:
    return WeightFormat("mxfp4 in its experts", (), stacks=Mxfp4())


def _modelopt(values: ConfigValues) -> WeightFormat:
    """Return a format of ModelOpt. values: of its own file, whose settings lie in `quantization`, or of config.json."""
    own = values.get("quantization")
    values = values.inside("quantization", own) if isinstance(own, dict) else values
    if values.get("quant_algo") is None and values.get("kv_cache_quant_algo"):
        return WeightFormat("full precision with scales of KV", (), unread=_ACTIVATION_SCALES)
    algorithm = _one_of(values, "quant_algo", "FP8", "NVFP4")
    kept = _names(values, "ignore", "exclude_modules")
    if algorithm == "FP8":
        return WeightFormat(
            "fp8 with one scale for each matrix", (Rule(Scaled(FLOAT8, (0, 0))),), kept, _ACTIVATION_SCALES
        )
    _one_of(values, "group_size", None, NV_BLOCK)
    return WeightFormat(f"nvfp4 in groups of {NV_BLOCK}", (Rule(MODELOPT_FP4),), kept, _ACTIVATION_SCALES)


def _producer(values: ConfigValues) -> str | None:
    """Return the name of the tool that wrote a checkpoint; early files of ModelOpt have it, and no quant_method."""
    found = values.get("producer")
    return found.get("name") if isinstance(found, dict) else None


def _compressed_tensors(values: ConfigValues) -> WeightFormat:
    for key in ("transform_config", "sparsity_config"):
        given = values.get(key)
        if given and not (isinstance(given, dict) and given.get("format") == "dense"):
            raise values.unsupported(key, "only quantised weights are read")
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(each, dict) for each in groups.values()):
        raise values.wrong("config_groups", groups, "an object of at least one object")
    rules = []
    for name, given in groups.items():
        layout = given.get("format") or values.get("format")
        group = values.inside(f"config_groups.{name}", given | {"format": layout})
        targets = _names(group, "targets")
        rules.append(Rule(_of_group(group), () if "Linear" in targets else targets))
    return WeightFormat("compressed-tensors", tuple(rules), _names(values, "ignore"), _ACTIVATION_SCALES)


def _of_group(group: ConfigValues) -> Encoding:
    """Return how the modules of one group of compressed-tensors are stored."""
    layout = _one_of(group, "format", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", _NVFP4)
    given = group.get("weights")
    if not isinstance(given, dict):
        raise group.wrong("weights", given, "an object")
    weights = group.inside("weights", given)
    if layout == _NVFP4:
        _one_of(weights, "group_size", NV_BLOCK)
        _one_of(weights, "symmetric", None, True)
        return COMPRESSED_FP4
    strategy = _one_of(weights, "strategy", "tensor", "channel", "group", "block")
    symmetric = weights.get("symmetric", True) is not False
    size = _group_size(weights) if strategy == "group" else 0
    if layout == "pack-quantized":
        _one_of(weights, "type", "int")
        _one_of(weights, "strategy", "channel", "group")
        any_order = weights.get("actorder") in ("group", "dynamic", True)  # its releases changed the name
        return OutputsFirst(_one_of(weights, "num_bits", 4, 8), size, symmetric, any_order=any_order)
    _one_of(weights, "num_bits", 8)
    dtype = {"int": INT8, "float": FLOAT8}[_one_of(weights, "type", "int", "float")]
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size)}
    block = blocks[strategy] if strategy in blocks else _block(weights, "block_structure")
    return Scaled(dtype, block, symmetric=symmetric)


_READERS = {
    "fp8": _fp8, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}  # fmt: skip


def _one_of(values: ConfigValues, key: str, *allowed: Any) -> Any:
    """Return a setting. Raises UnsupportedModelError: it is none of those that are read; None: it need not be set."""
    found = values.get(key)
    if found not in allowed:
        names = [repr(each) for each in allowed if each is not None]
        raise values.unsupported(key, f"only {' and '.join(names)} {'is' if len(names) == 1 else 'are'}")
    return found


def _block(values: ConfigValues, key: str) -> tuple[int, int]:
    """Return outputs and inputs of a block. Raises CheckpointError."""
    found = _integers(values.get(key))
    if len(found) != 2 or min(found) < 1:
        raise values.wrong(key, values.get(key), "two integers >= 1")
    return found[0], found[1]


def _group_size(values: ConfigValues) -> int:
    """Return the inputs that share a scale; 0 for all, which files write as -1."""
    size = values.get("group_size")
    if not isinstance(size, int) or size == 0 or size < -1:
        raise values.wrong("group_size", size, "an integer >= 1, or -1 for all inputs")
    return max(size, 0)


def _scales_of(size: int) -> str:
    return f"groups of {size}" if size else "one scale for each row"


def _integers(value: Any) -> tuple[int, ...]:
    """Return a list's integers; empty if it is not one of integers."""
    found = tuple(value) if isinstance(value, list | tuple) else ()
    return found if all(isinstance(each, int) for each in found) else ()


def _names(values: ConfigValues, *keys: str) -> tuple[str, ...]:
    """Return the names that lists of modules hold together. Raises CheckpointError: another value stands there."""
    found: list[str] = []
    for key in keys:
        given = values.get(key) or []
        if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
            raise values.wrong(key, given, "a list of names of modules")
        for each in given:
            try:
                re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
            except re.error as error:
                raise values.wrong(key, each, f"a regular expression behind re: ({error})") from None
        found += given
    return tuple(found)
