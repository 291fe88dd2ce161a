"""Weights from a Hugging Face checkpoint folder: memory-mapped safetensors into the decoder's dict of arrays.

Nothing is read before every tensor's name and shape has been checked against config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.config import ModelConfig, read_json
from adaserve_jax.models.decoder import Params, param_specs

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F16", "BF16", "F32", "F64")
# Buffers that old exports carry and that the decoder computes itself.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"


def load_params(folder: str | Path, config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Read all weights, cast to dtype, fused as the decoder wants them; host memory holds one fused weight at a time.

    Raises CheckpointError: a file is missing or unreadable; a tensor is missing, not asked for, or of another shape
    than config.json says.
    """
    plan = {name: (_sources(name, config), shape) for name, (shape, _) in param_specs(config).items()}
    expected = {source: shape for sources, _ in plan.values() for source, shape in sources.items()}
    with _Tensors(Path(folder)) as tensors:
        tensors.check(expected, optional=("lm_head.weight",) if config.tie_embeddings else ())
        return {name: tensors.fused(tuple(sources), shape, dtype) for name, (sources, shape) in plan.items()}


def _sources(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensors behind one weight, in the order of their rows, with shapes."""
    d, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    top = {
        "embed": {"model.embed_tokens.weight": (config.vocab_size, d)},
        "norm": {"model.norm.weight": (d,)},
        "head": {"lm_head.weight": (config.vocab_size, d)},
    }
    if name in top:
        return top[name]
    _, index, part = name.split(".")
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        "attn_norm": {f"{prefix}.input_layernorm.weight": (d,)},
        "qkv": {
            f"{attention}.q_proj.weight": (q, d),
            f"{attention}.k_proj.weight": (kv, d),
            f"{attention}.v_proj.weight": (kv, d),
        },
        "out": {f"{attention}.o_proj.weight": (d, q)},
        "mlp_norm": {f"{prefix}.post_attention_layernorm.weight": (d,)},
        "gate_up": {f"{mlp}.gate_proj.weight": (inner, d), f"{mlp}.up_proj.weight": (inner, d)},
        "down": {f"{mlp}.down_proj.weight": (d, inner)},
    }[part]


class _Tensors:
    """The tensors of a checkpoint folder, one file or many, open while the `with` block runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> _Tensors:
        for path in _weight_files(self.folder):
            try:
                opened = safe_open(path, framework="numpy")
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; expected the checkpoint's weights in it") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
            self._file_of |= dict.fromkeys(opened.keys(), opened)
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: tuple[str, ...]) -> None:
        """Compare names, shapes and types with what config.json says; raise on the first difference."""
        missing = [name for name in expected if name not in self._file_of]
        if missing:
            name = missing[0]
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing, expected with shape {list(expected[name])}"
                f"{_and_more(missing)}; the files and config.json do not belong together"
            )
        known = {*expected, *optional}
        extra = sorted(n for n in self._file_of if n not in known and not n.endswith(_COMPUTED_SUFFIX))
        if extra:
            raise CheckpointError(
                f"{self.folder}: tensor {extra[0]} is not part of a model with this config.json{_and_more(extra)}; "
                "the files and config.json do not belong together"
            )
        for name, shape in expected.items():
            found = self._file_of[name].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} has shape {found.get_shape()}, expected {list(shape)} by config.json"
                )
            if found.get_dtype() not in _FLOATS:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} has type {found.get_dtype()}, expected one of {', '.join(_FLOATS)}"
                )

    def fused(self, names: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """The named tensors under one another, as one device array of the given shape and type."""
        fused = np.empty(shape, dtype)
        row = 0
        for name in names:
            part = self._file_of[name].get_tensor(name)
            fused[row : row + len(part)] = part
            row += len(part)
        return jnp.asarray(fused)


def _weight_files(folder: Path) -> list[Path]:
    """One file, or those that the index names. A name that leaves the folder is refused."""
    if (folder / _SINGLE_FILE).exists():
        return [folder / _SINGLE_FILE]
    index = folder / _INDEX_FILE
    if not index.exists():
        raise CheckpointError(f"{folder}: expected {_SINGLE_FILE} or {_INDEX_FILE}, found neither")
    weight_map = read_json(index).get("weight_map")
    names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index}: expected a weight_map from tensor names to names of files beside it")
    return [folder / name for name in names]


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
