"""The shape of a model, read from a checkpoint folder's config.json. Imports no jax.

Everything that the decoder does not implement is refused here, by the name of the setting, before a weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaserve_jax.errors import CheckpointError, UnsupportedModelError

_LLAMA_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What transformers assumes for a key that config.json leaves out, per architecture.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA_DEFAULTS,
    "MistralForCausalLM": _LLAMA_DEFAULTS
    | {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
_ARCHITECTURE_OF_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder. num_heads queries share num_kv_heads keys; head_dim need not be hidden_size / num_heads.

    max_position: tokens of context that the model was made for. eos_token_ids: any of them ends a text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json, and generation_config.json for the EOS ids when it is there.

        Raises CheckpointError: a file or key is missing or malformed. UnsupportedModelError: the model asks for
        something that the decoder does not implement; the setting is named.
        """
        path = Path(folder) / "config.json"
        given = read_json(path)
        architecture = _architecture(given, path)
        values = _DEFAULTS[architecture] | given
        _refuse_unsupported(values, path)
        heads = _integer(values, "num_attention_heads", path)
        hidden = _integer(values, "hidden_size", path)
        config = cls(
            vocab_size=_integer(values, "vocab_size", path),
            hidden_size=hidden,
            intermediate_size=_integer(values, "intermediate_size", path),
            num_layers=_integer(values, "num_hidden_layers", path),
            num_heads=heads,
            num_kv_heads=_integer(values, "num_key_value_heads", path, default=heads),
            head_dim=_integer(values, "head_dim", path, default=hidden // heads),
            rope_theta=_rope_theta(values, path),
            rms_norm_eps=_positive(values["rms_norm_eps"], "rms_norm_eps", path),
            tie_embeddings=bool(values["tie_word_embeddings"]),
            max_position=_integer(values, "max_position_embeddings", path),
            eos_token_ids=_eos_ids(Path(folder), values),
            bos_token_id=values["bos_token_id"],
        )
        if config.num_heads % config.num_kv_heads:
            raise CheckpointError(
                f"{path}: num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {config.num_heads} and {config.num_kv_heads}"
            )
        if config.head_dim % 2:
            raise CheckpointError(f"{path}: head_dim must be even for rotary embedding, got {config.head_dim}")
        return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; expected a Hugging Face checkpoint folder with config.json, safetensors and tokenizer"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _architecture(given: dict[str, Any], path: Path) -> str:
    named: list[Any] = given.get("architectures") or [_ARCHITECTURE_OF_TYPE.get(given.get("model_type", ""))]
    if len(named) == 1 and named[0] in _DEFAULTS:
        return named[0]
    asked = given.get("architectures") or given.get("model_type")
    raise UnsupportedModelError(f"{path}: architectures {asked!r} is not supported; use one of {', '.join(_DEFAULTS)}")


def _refuse_unsupported(values: dict[str, Any], path: Path) -> None:
    for name in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        if values.get(name):
            raise UnsupportedModelError(
                f"{path}: {name} = {values[name]!r} is not supported; use a checkpoint without it"
            )
    if values["hidden_act"] != "silu":
        raise UnsupportedModelError(f"{path}: hidden_act = {values['hidden_act']!r} is not supported, only 'silu' is")
    for name in ("rope_scaling", "rope_parameters"):
        _refuse_rope_scaling(name, values.get(name), path)
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{path}: partial_rotary_factor = {values['partial_rotary_factor']!r} is not supported, only 1.0 is"
        )


def _refuse_rope_scaling(name: str, rope: Any, path: Path) -> None:
    if rope is None:
        return
    plain = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
    kind = (rope.get("rope_type") or rope.get("type") or "default") if plain else rope
    if kind != "default":
        raise UnsupportedModelError(f"{path}: {name} of type {kind!r} is not supported, only 'default' is")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{path}: partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported, only 1.0 is"
        )


def _rope_theta(values: dict[str, Any], path: Path) -> float:
    """transformers 5 keeps the base in rope_parameters, older versions at the top."""
    nested = values.get("rope_parameters") or {}
    return _positive(nested.get("rope_theta", values.get("rope_theta", 10000.0)), "rope_theta", path)


def _eos_ids(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text: generation_config.json's first, then config.json's."""
    path = folder / "generation_config.json"
    sources = [read_json(path).get("eos_token_id")] if path.exists() else []
    ids: list[int] = []
    for source in [*sources, values["eos_token_id"]]:
        for token in source if isinstance(source, list) else [source]:
            if token is not None and token not in ids:
                ids.append(token)
    return tuple(ids)


def _integer(values: dict[str, Any], name: str, path: Path, default: int | None = None) -> int:
    value = values.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: {name} must be an integer >= 1, got {value!r}")
    return value


def _positive(value: Any, name: str, path: Path) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{path}: {name} must be a number above 0, got {value!r}")
    return float(value)
