"""The first MTP layer of a MiMo checkpoint in NumPy float64. Shares no code with the package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.oracles.eagle3 import Attention, norm

LAYER = "model.mtp_layers.0."


class MtpLayer:
    """A layer that drafts after a text: fed with the target's outputs after its last norm first, then with its own."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.attention = Attention(self.config)

    def read_target(self, tokens: list[int], outputs: np.ndarray) -> np.ndarray:
        """Feed tokens 1..n of a text with the target's outputs f[n, d] at 0..n-1. Returns the last entry's feature."""
        out = np.zeros(0)
        for token, feature in zip(tokens, outputs, strict=True):
            out = self.step(token, feature)
        return out

    def step(self, token: int, feature: np.ndarray) -> np.ndarray:
        """Feed one token with the feature before it, f[d]; attend to all that was fed. Returns the next feature."""
        eps = self.config["rms_norm_eps"]

        def weight(name: str) -> np.ndarray:
            return self.w[f"{LAYER}{name}.weight"]

        embedded = norm(self.w["model.embed_tokens.weight"][token], weight("token_layernorm"), eps)
        x = weight("input_proj") @ np.concatenate([norm(feature, weight("hidden_layernorm"), eps), embedded])
        h = norm(x, weight("input_layernorm"), eps)
        projected = (
            weight(f"self_attn.{each}_proj") @ h + self.w[f"{LAYER}self_attn.{each}_proj.bias"] for each in "qkv"
        )
        x = x + weight("self_attn.o_proj") @ self.attention.mix(*projected)
        h = norm(x, weight("post_attention_layernorm"), eps)
        gate = weight("mlp.gate_proj") @ h
        x = x + weight("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * (weight("mlp.up_proj") @ h))
        return norm(x, weight("final_layernorm"), eps)

    def logits(self, feature: np.ndarray) -> np.ndarray:
        """Return the scores of the target's tokens, f64[V]."""
        return self.w["lm_head.weight"] @ feature
