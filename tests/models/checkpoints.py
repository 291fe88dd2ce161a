"""Tiny random checkpoints in Hugging Face's format, written for a test into its own folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.loading import load_params

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip
EOS, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('role tool is not known') }}{% endif %}"
    "{{ ('<|user|>' if m['role'] == 'user' else '<|assistant|>') + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}


def write_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "f32",
    shards: int = 1,
    tokenizer: Tokenizer | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    **config_overrides: Any,
) -> Path:
    """Write config.json, weights drawn from `seed`, and a tokenizer; return the folder.

    config_overrides replace keys of CONFIG; None removes a key. shards > 1 writes an index and that many files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | config_overrides).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: array.astype(_TYPES[dtype]) for name, array in random_tensors(config, seed).items()}
    write_tensors(folder, tensors, shards)
    write_tokenizer(folder, tokenizer or byte_tokenizer(), chat_template)
    return folder


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Tensors under Hugging Face's names, scaled so that attention is peaked and logits spread over a few units."""
    rng = np.random.default_rng(seed)
    d, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", d // heads)
    q, kv = heads * dim, config.get("num_key_value_heads", heads) * dim

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return rng.standard_normal((outputs, inputs)) * 1.5 / np.sqrt(inputs)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, d)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], d), "model.norm.weight": norm()}
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = matrix(config["vocab_size"], d)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        tensors |= {p + "input_layernorm.weight": norm(), p + "post_attention_layernorm.weight": norm()}
        shapes = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        tensors |= {f"{p}self_attn.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        experts = config.get("num_local_experts", 0)
        if not experts:
            shapes = {"gate_proj": (inner, d), "up_proj": (inner, d), "down_proj": (d, inner)}
            tensors |= {f"{p}mlp.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
            continue
        p += "block_sparse_moe."
        tensors[f"{p}gate.weight"] = matrix(experts, d)
        shapes = {"w1": (inner, d), "w3": (inner, d), "w2": (d, inner)}
        for expert in range(experts):
            tensors |= {f"{p}experts.{expert}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    return tensors


def write_tensors(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """Write model.safetensors, or an index and `shards` files between which the names are dealt out."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for name in names:
        part = {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}
        save_file(part, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": 256,
        "chat_template": chat_template,
    }
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE: three special tokens, the 256 bytes, and merges, some of which end inside a character."""
    alphabet = _byte_alphabet()
    vocab = {token: i for i, token in enumerate([EOS, USER, ASSISTANT, *sorted(alphabet.values())])}
    merges: list[tuple[str, str]] = []
    for text in (b" a", b"th", b"the", b" the", b"in", b"ing", "é".encode(), "😀".encode()[:3], b" \xf0", b"\n\n"):
        symbols = [alphabet[byte] for byte in text]
        merge = ("".join(symbols[:-1]), symbols[-1])
        if merge[0] in vocab:
            merges.append(merge)
            vocab.setdefault("".join(symbols), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, USER, ASSISTANT])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A SentencePiece-like BPE: word marks, one token per unknown byte, and a first space that decoding strips."""
    words = ["▁", "▁the", "▁a", "▁cat", "t", "h", "e", "c", "a", ".", "é", "▁th"]
    vocab = {token: i for i, token in enumerate([EOS, USER, ASSISTANT, *(f"<0x{b:02X}>" for b in range(256)), *words])}
    merges = [("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([EOS, USER, ASSISTANT])
    return tokenizer


def with_ids(tokenizer: Tokenizer, new_ids: np.ndarray) -> Tokenizer:
    """Return the tokenizer with other token ids: what was token i is token new_ids[i], i64[V]."""
    whole = json.loads(tokenizer.to_str())
    model = whole["model"]
    model["vocab"] = {token: int(new_ids[i]) for token, i in model["vocab"].items()}
    for token in whole["added_tokens"]:
        token["id"] = int(new_ids[token["id"]])
    whole["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(whole))


def write_with_ids(folder: Path, source: Path, new_ids: np.ndarray) -> Path:
    """Write the checkpoint of `source` with other token ids, in tokenizer and weights: the same function of texts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        rows = np.empty_like(tensors[name])
        rows[new_ids] = tensors[name]
        tensors[name] = rows
    write_tensors(folder, tensors)
    write_tokenizer(folder, with_ids(Tokenizer.from_file(str(source / "tokenizer.json")), new_ids))
    return folder


def _byte_alphabet() -> dict[int, str]:
    """Byte to printable character, as byte-level BPE spells it: printable bytes as they are, others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def write_eagle3(
    folder: Path, *, seed: int = 0, features: int = 32, own_embedding: bool = True, **config_overrides: Any
) -> Path:
    """Write an EAGLE-3 head in SpecForge's format for a target with the vocabulary of CONFIG; return the folder.

    features: hidden size of the target. config_overrides replace keys; None removes a key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 200}
    wanted |= {"target_hidden_size": features}
    config = {key: value for key, value in (CONFIG | wanted | config_overrides).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    d, vocab_size = config["hidden_size"], config["vocab_size"]
    rows = config.get("draft_vocab_size", vocab_size)
    tensors = random_tensors(config, seed)
    layer = {name: tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.0.")}
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for name, tensor in layer.items():
        short = name.removeprefix("model.layers.0.")
        if short.split(".")[1] in ("q_proj", "k_proj", "v_proj"):  # of embedding and feature together
            tensor = rng.standard_normal((len(tensor), 2 * d)) * 1.5 / np.sqrt(2 * d)
        tensors[f"midlayer.{short}"] = tensor
    tensors["midlayer.hidden_norm.weight"] = rng.uniform(0.5, 1.5, d)
    tensors["fc.weight"] = rng.standard_normal((d, 3 * features)) * 1.5 / np.sqrt(3 * features)
    if not own_embedding:
        del tensors["embed_tokens.weight"]
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:rows]
    chosen = np.sort(rng.permutation(vocab_size)[:rows])
    tensors["d2t"] = chosen - np.arange(rows)
    tensors["t2d"] = np.isin(np.arange(vocab_size), chosen)
    write_tensors(folder, tensors)
    return folder


def write_mimo(folder: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Write a checkpoint of MiMo's architecture, with an MTP layer behind the model's layers; return the folder."""
    wanted = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    wanted |= {"num_nextn_predict_layers": 1}
    write_checkpoint(folder, seed=seed, **wanted | config_overrides)
    config = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(seed + 1)
    d, last = config["hidden_size"], config["num_hidden_layers"]
    # the MTP layer is one layer more than the model's own
    tensors = random_tensors(config | {"num_hidden_layers": last + 1}, seed)
    for name, tensor in list(tensors.items()):
        module, _, _ = name.rpartition(".")
        if module.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{module}.bias"] = rng.standard_normal(len(tensor))
    own, layer = f"model.layers.{last}.", "model.mtp_layers.0."
    tensors = {name.replace(own, layer): tensor for name, tensor in tensors.items()}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{layer}{name}.weight"] = rng.uniform(0.5, 1.5, d)
    tensors[f"{layer}input_proj.weight"] = rng.standard_normal((d, 2 * d)) * 1.5 / np.sqrt(2 * d)
    write_tensors(folder, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    return folder


def write_medusa(
    folder: Path, *, seed: int = 0, size: int = 32, vocab_size: int = 320, heads: int = 3, blocks: int = 1
) -> Path:
    """Write Medusa heads in their published format, with a tensor of the target beside them; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "hidden_size": size, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors = {"lm_head.weight": np.zeros((vocab_size, size))}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"medusa_head.{head}.{block}.linear.weight"] = rng.standard_normal((size, size)) / np.sqrt(size)
            tensors[f"medusa_head.{head}.{block}.linear.bias"] = rng.standard_normal(size)
        tensors[f"medusa_head.{head}.{blocks}.weight"] = rng.standard_normal((vocab_size, size)) * 1.5 / np.sqrt(size)
    write_tensors(folder, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    return folder


def load(folder: Path, dtype: Any = np.float32, quantize: str = "none") -> dict[str, np.ndarray]:
    """Return the weights that a checkpoint is loaded as."""
    params = load_params(folder, ModelConfig.from_folder(folder), dtype, quantize=quantize)
    return {name: np.asarray(value) for name, value in params.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)
