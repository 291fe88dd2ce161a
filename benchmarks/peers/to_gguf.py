"""Writes a Llama checkpoint folder as an f32 GGUF file, which llama.cpp reads.

    python -m benchmarks.peers.to_gguf CHECKPOINT --out target.gguf

llama.cpp's own converter knows tokenizers by name, and not that of the embedded pair. Here the vocabulary is written as
it is, for prompts that are sent as token ids; texts would be split by the rule of Qwen 2, which is near, not equal.
Needs `pip install gguf`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from adaserve_jax.models.config import resolve_folder

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Names of a layer's weights in Hugging Face's checkpoints and in GGUF."""
SPLIT = "qwen2"


def write(folder: Path, out: Path) -> None:
    """Write the checkpoint of `folder` to `out`."""
    from gguf import GGUFWriter, TokenType

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLIT)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    pairs = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    for name, weight in weights(folder):
        if name.endswith("attn_q.weight"):
            weight = interleaved(weight, heads)
        elif name.endswith("attn_k.weight"):
            weight = interleaved(weight, kv_heads)
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names that GGUF gives to weights, and the weights in f32."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            yield gguf_name(name), np.ascontiguousarray(weight.astype(np.float32))


def gguf_name(name: str) -> str:
    """Return GGUF's name of a weight of a Llama checkpoint."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole or name == "lm_head.weight":
        return whole.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k in the order of GGUF, whose rotary embedding turns neighbours: 0, D/2, 1, D/2 + 1."""
    return np.ascontiguousarray(weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("checkpoint", help="folder, or demo for the embedded target")
    made.add_argument("--role", choices=("target", "draft"), default="target", help="which of the pair demo means")
    made.add_argument("--out", type=Path, required=True)
    given = made.parse_args()
    write(Path(resolve_folder(given.checkpoint, given.role)), given.out)


if __name__ == "__main__":
    main()
