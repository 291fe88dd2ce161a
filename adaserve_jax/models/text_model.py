"""The text model inside a checkpoint of images and text, which is served alone.

Its settings lie in `text_config`, in older files beside the rest. Its tensors have a prefix, and lie beside those of
the image encoder, which are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaserve_jax.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class _Whole:
    """One architecture of images and text. own: `model_type` of its config.json. texts: architecture and `model_type`
    of a checkpoint of the text model alone, by the `model_type` of text_config; the first holds without one. left_out:
    settings of the text model that published files leave out, as transformers assumes them."""

    own: str
    texts: dict[str, tuple[str, str]]
    left_out: dict[str, Any] = field(default_factory=dict)


_QWEN2_VL = {
    "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80, "rope_theta": 1e6,
}  # fmt: skip
_QWEN2, _QWEN3 = ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")
_WHOLE = {
    "Gemma3ForConditionalGeneration": _Whole(
        "gemma3", {"gemma3_text": ("Gemma3ForCausalLM", "gemma3_text")},
        {"vocab_size": 262208, "num_attention_heads": 8},
    ),
    "Mistral3ForConditionalGeneration": _Whole(
        "mistral3", {
            "mistral": ("MistralForCausalLM", "mistral"), "ministral3": ("Ministral3ForCausalLM", "ministral3"),
        },
    ),
    "Qwen2VLForConditionalGeneration": _Whole("qwen2_vl", {"qwen2_vl_text": _QWEN2}, _QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": _Whole("qwen2_5_vl", {"qwen2_5_vl_text": _QWEN2}, _QWEN2_VL),
    "Qwen3VLForConditionalGeneration": _Whole(
        "qwen3_vl", {"qwen3_vl_text": _QWEN3}, {"max_position_embeddings": 128000, "rope_theta": 5e5}
    ),
}  # fmt: skip
WITH_IMAGES = tuple(_WHOLE)
"""Architectures of images and text whose text model is served."""
_SHARED = ("eos_token_id", "quantization_config", "tie_word_embeddings", "dtype", "torch_dtype")
"""Settings that stand at the top of a nested config.json, for its text model too."""
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Beginning of the names of the text model's tensors, in older and newer files, and what stands there in a checkpoint
of it alone."""
_ENCODERS = ("vision_tower.", "multi_modal_projector.", "visual.")


def text_settings(given: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a config.json as a checkpoint of its text model alone would have it; as it is if it has no images.

    Rotary positions of several axes become plain ones, which they are where there is text alone.
    Raises CheckpointError: text_config is no object; UnsupportedModelError: it is of another model than is known.
    """
    whole = _whole_of(given)
    if whole is None:
        return given
    own, first = given.get("text_config"), next(iter(whole.texts))
    if own is None:
        own = {name: value for name, value in given.items() if name not in ("vision_config", "model_type")}
    elif not isinstance(own, dict):
        raise CheckpointError(f"{path}: text_config must be an object, got {own!r}")
    kind = str(own.get("model_type", first))
    if kind not in whole.texts:
        raise UnsupportedModelError(
            f"{path}: text_config.model_type = {kind!r} is not supported; use one of {', '.join(whole.texts)}"
        )
    shared = {name: given[name] for name in _SHARED if given.get(name) is not None}
    found = whole.left_out | own | shared
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), dict):
            found[name] = _plain_rope(found[name])
    architecture, model_type = whole.texts[kind]
    return found | {"architectures": [architecture], "model_type": model_type}


def _whole_of(given: dict[str, Any]) -> _Whole | None:
    names = given.get("architectures")
    if isinstance(names, list) and len(names) == 1:
        return _WHOLE.get(str(names[0]))
    return None if names else next((each for each in _WHOLE.values() if each.own == given.get("model_type")), None)


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}


def text_name(name: str) -> str | None:
    """Return a tensor's name in a checkpoint of the text model alone; None for one of the image encoder."""
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return None if name.removeprefix("model.").startswith(_ENCODERS) else name
