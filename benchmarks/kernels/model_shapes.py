"""Configurations of published models, to plan engines and compile programs without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rope_theta": 5e5,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_act": "silu",
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "use_sliding_window": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-70b": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "qwen-0.5b": QWEN | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen-7b": QWEN | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen-32b": QWEN | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    },
}  # fmt: skip
"""Llama 3.1 and 3.2, and Qwen2.5, as their config.json files have them, but for a context of 8192."""


def write_shapes(root: Path) -> dict[str, Path]:
    """Write a folder with a config.json for each shape, and nothing else. Returns the folders by name."""
    folders = {name: root / name for name in SHAPES}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folders
