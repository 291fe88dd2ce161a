"""Reads a LoRA adapter in PEFT's format: checks it against the model, and returns the decoder's fused matrices."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.checkpoint_formats.encoding import FLOATS
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.config_values import ConfigValues, read_json
from adaserve_jax.models.decoder import LORA_A, LORA_B, adapter_specs
from adaserve_jax.models.loading import hf_tensors
from adaserve_jax.models.text_model import text_name

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's prefix of the names of the model's own tensors."""
Matrices = dict[str, np.ndarray]
"""f32 matrices of one adapter, by the names of `adapter_specs`: A is f[P rank, in], B f[out, P rank] with the scale."""

_NEEDS = {
    "use_dora": "weight-decomposed adapters need the norm of each merged row; merge the adapter into the weights",
    "modules_to_save": "whole weights beside an adapter would be a second model; merge the adapter into the weights",
    "rank_pattern": "one rank holds for all modules; train the adapter with one rank",
    "alpha_pattern": "one lora_alpha holds for all modules; train the adapter with one",
    "target_parameters": "experts would need a product per expert and adapter; adapt the attention instead",
    "lora_bias": "adapters add no bias; train the adapter without",
    "layer_replication": "the model's layers are those of its checkpoint; merge the adapter into the weights",
    "trainable_token_indices": "embeddings are shared by all requests; merge the adapter into the weights",
    "alora_invocation_tokens": "an adapter holds for all tokens of a request; train it without invocation tokens",
    "use_qalora": "adapters of pooled inputs are not implemented; merge the adapter into the weights",
    "fan_in_fan_out": "the models here have no weight of inputs by outputs; train the adapter without",
    "kasa_config": "adapters that change the base weights are not implemented; merge the adapter into the weights",
}
"""Settings that must be empty or false, and what an adapter with them would need."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings of `init_lora_weights` for which PEFT changes the base weights when it loads the adapter."""


def read_adapter(folder: str | Path, config: ModelConfig, max_rank: int) -> Matrices:
    """Return the matrices of an adapter, f32, its rank padded to `max_rank` with zeros.

    What the adapter does not change is 0. config: of the whole model.
    Raises CheckpointError: a file is missing or unreadable, a tensor does not fit the model, the rank is above
    `max_rank`, or a value is not finite; UnsupportedModelError: the adapter is of a kind that is not implemented.
    """
    folder = Path(folder)
    values = ConfigValues(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
    rank, scale = _rank_and_scale(values, max_rank)
    modules = _modules(config)
    path = folder / WEIGHTS_FILE
    if not path.exists():
        raise CheckpointError(f"{path} is missing; expected an adapter that PEFT saved as safetensors")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = _check_tensors(path, slices, modules, rank)
            _check_complete(values, found, modules)
            return _fuse(path, file, found, modules, config, max_rank, scale)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None


def _rank_and_scale(values: ConfigValues, max_rank: int) -> tuple[int, float]:
    """Return r and what B is multiplied by. Raises as `read_adapter` does."""
    if values.get("peft_type") != "LORA":
        raise values.unsupported("peft_type", "only LORA is")
    for name, advice in _NEEDS.items():
        if values.get(name):
            raise values.unsupported(name, advice)
    if values.get("bias", "none") not in (None, "none"):
        raise values.unsupported("bias", "adapters change no bias; train the adapter with bias none")
    if str(values.get("init_lora_weights")).lower().startswith(_CHANGE_BASE):
        raise values.unsupported(
            "init_lora_weights",
            "such an adapter belongs to base weights that PEFT changes; save it again with "
            "path_initial_model_for_weight_conversion, or merge it into the weights",
        )
    rank = values.integer("r")
    if rank > max_rank:
        raise CheckpointError(
            f"{values.path}: r must be at most {max_rank}, the max_lora_rank of this engine, got {rank}; start it "
            f"with max_lora_rank {rank}"
        )
    alpha = values.positive("lora_alpha")
    return rank, alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)


def _modules(config: ModelConfig) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Return, for each module that may be adapted, the decoder's weight, the module's place in it, and its shape."""
    weights = [name.removesuffix(LORA_A) for name in adapter_specs(config, 1, 1) if name.endswith(LORA_A)]
    return {
        tensor.removesuffix(".weight"): (weight, place, shape)
        for weight in weights
        for place, (tensor, shape) in enumerate(hf_tensors(weight, config).items())
    }


def _check_tensors(
    path: Path, slices: dict[str, Any], modules: dict[str, Any], rank: int
) -> dict[str, tuple[str, str]]:
    """Return the tensors of A and B of each adapted module. Raises as `read_adapter` does."""
    found: dict[str, dict[str, str]] = {}
    for name, tensor in slices.items():
        own, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        module = text_name(own) or own
        if part not in ("lora_A", "lora_B") or not name.startswith(PREFIX) or not name.endswith(".weight"):
            raise UnsupportedModelError(
                f"{path}: tensor {name} is not supported; expected {PREFIX}MODULE.lora_A.weight and lora_B.weight"
            )
        if module not in modules:
            raise UnsupportedModelError(f"{path}: tensor {name} is not supported; {_why_unknown(module, modules)}")
        outputs, inputs = modules[module][2]
        expected = (rank, inputs) if part == "lora_A" else (outputs, rank)
        if tuple(tensor.get_shape()) != expected:
            raise CheckpointError(
                f"{path}: tensor {name} must have shape {list(expected)} for this model and r = {rank}, got "
                f"{list(tensor.get_shape())}; the adapter is of another model"
            )
        if tensor.get_dtype() not in FLOATS:
            raise UnsupportedModelError(
                f"{path}: tensor {name} of type {tensor.get_dtype()} is not supported; save the adapter as one of "
                f"{', '.join(FLOATS)}"
            )
        found.setdefault(module, {})[part] = name
    for module, parts in found.items():
        if len(parts) < 2:
            lacks = "lora_B" if "lora_A" in parts else "lora_A"
            raise CheckpointError(f"{path}: {PREFIX}{module}.{lacks}.weight is missing; save the adapter again")
    if not found:
        raise CheckpointError(f"{path} holds no tensor; expected at least one adapted module")
    return {module: (parts["lora_A"], parts["lora_B"]) for module, parts in found.items()}


def _why_unknown(module: str, modules: dict[str, Any]) -> str:
    if ".experts." in module or module.endswith((".router", ".gate")):
        return f"experts cannot be adapted: {_NEEDS['target_parameters']}"
    known = sorted({name.rpartition(".")[2] for name in modules})
    if module.rpartition(".")[2] in known:
        return "the model has no such layer; the adapter is of another model"
    return f"modules of this model that can be adapted are {', '.join(known)}"


def _check_complete(values: ConfigValues, found: dict[str, Any], modules: dict[str, Any]) -> None:
    """Raise CheckpointError: a module that `target_modules` names is not adapted in every layer that has it."""
    layers = values.get("layers_to_transform")
    wanted = {layers} if isinstance(layers, int) else set(layers or ())
    for module in modules:
        layer = re.search(r"\.(\d+)\.", module)
        if wanted and (layer is None or int(layer[1]) not in wanted):
            continue
        asked = _is_named(values, "target_modules", module) and not _is_named(values, "exclude_modules", module)
        if asked and module not in found:
            raise CheckpointError(
                f"{values.path}: target_modules name {module.rpartition('.')[2]}, but {WEIGHTS_FILE} has nothing for "
                f"{module}; save the adapter again"
            )


def _is_named(values: ConfigValues, setting: str, module: str) -> bool:
    """Return whether a setting names a module, as PEFT reads it: a list holds the ends of names, a text is a regular
    expression of a whole name.
    """
    given = values.get(setting)
    if isinstance(given, list):
        return any(module == name or module.endswith(f".{name}") for name in given)
    try:
        return isinstance(given, str) and re.fullmatch(given, module) is not None
    except re.error as error:
        told = f"{values.path}: {setting} must be a regular expression or a list of names, got {given[:80]!r}: {error}"
        raise CheckpointError(told) from None


def _fuse(
    path: Path, file: Any, found: dict[str, tuple[str, str]], modules: dict[str, Any], config: ModelConfig,
    max_rank: int, scale: float,
) -> Matrices:  # fmt: skip
    """Read the tensors into the matrices: A of each projection below the other, B as a block of its own."""
    specs = adapter_specs(config, 1, max_rank)
    fused = {name: np.zeros(shape[1:], np.float32) for name, (shape, _) in specs.items()}
    for module, (a, b) in found.items():
        weight, place, (outputs, _) = modules[module]
        first = place * max_rank
        rows = sum(shape[0] for other, at, shape in modules.values() if other == weight and at < place)
        for tensor, into, part in (
            (a, fused[weight + LORA_A][first:], 1.0),
            (b, fused[weight + LORA_B][rows : rows + outputs, first:], scale),
        ):
            values = np.asarray(file.get_tensor(tensor)).astype(np.float32) * np.float32(part)
            if not np.isfinite(values).all():
                raise CheckpointError(f"{path}: tensor {tensor} must be finite, got a value that is not")
            into[: values.shape[0], : values.shape[1]] = values
    return fused
