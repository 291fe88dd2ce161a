"""Write a training checkpoint as two Hugging Face folders, target and draft, in f16."""

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from bpe import save_tokenizer
from corpus import EOS
from llama import DRAFT, TARGET, Shape
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

DEMO = Path(__file__).parents[2] / "adaserve_jax/models/demo"


def hf_config(shape: Shape, eos_id: int) -> dict:
    """Return config.json of a LlamaForCausalLM of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
        "torch_dtype": "float16",
        "use_cache": True,
    }


def export_model(weights: dict[str, Tensor], shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write one loadable checkpoint: weights, configuration, generation defaults, tokenizer."""
    save_tokenizer(tokenizer, folder, max_length=shape.max_position_embeddings)
    eos_id = tokenizer.token_to_id(EOS)
    generation = {"bos_token_id": eos_id, "eos_token_id": eos_id, "pad_token_id": eos_id}
    for name, content in (("config.json", hf_config(shape, eos_id)), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {f"model.{name}": weight.to(torch.float16).contiguous() for name, weight in weights.items()}
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise ValueError(f"{folder}: a weight does not fit f16; train with a lower learning rate")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the training run's folder")
    parser.add_argument("--out", type=Path, default=DEMO)
    args = parser.parse_args()
    state = torch.load(args.work / "checkpoint.pt", weights_only=True)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    export_model(state["target"], TARGET, tokenizer, args.out / "target")
    export_model(state["draft"], DRAFT, tokenizer, args.out / "draft")
    (args.out / "training.json").write_text(json.dumps(state["counters"], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
