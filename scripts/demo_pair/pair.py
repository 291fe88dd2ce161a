"""The exported pair as an outside user loads it, and the held-out text it is measured on."""

import dataclasses
from pathlib import Path

import torch
from corpus import EOS, documents
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DEMO = Path(__file__).parents[2] / "adaserve_jax/models/demo"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both models in f32 (their weights rounded to f16 by the export) and the tokenizer they share."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def eos_id(self) -> int:
        """The id of the end-of-text token."""
        return self.tokenizer.convert_tokens_to_ids(EOS)


def load_pair(folder: Path) -> Pair:
    """Load target and draft from a folder that export.py wrote."""
    models = [AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("target", "draft")]
    return Pair(*(model.eval() for model in models), AutoTokenizer.from_pretrained(folder / "target"))


def held_out_texts(gsm8k: Path) -> dict[str, list[str]]:
    """Return the held-out texts by kind (lib, test, maths, maths_chat, code_chat)."""
    texts: dict[str, list[str]] = {}
    for doc in documents(gsm8k):
        if doc.held_out:
            texts.setdefault(doc.kind, []).append(doc.text)
    return texts


def windows(pair: Pair, texts: list[str], *, length: int, limit: int) -> Tensor:
    """Return i64[N, length + 1], consecutive windows of the texts joined by end-of-text, at most `limit` of them.

    Windows overlap by one token, so that every token but the first is predicted once. If there are more windows than
    `limit`, they are taken evenly from all the text.
    """
    ids: list[int] = [pair.eos_id]
    for text in texts:
        ids += [*pair.tokenizer(text, add_special_tokens=False)["input_ids"], pair.eos_id]
    count = (len(ids) - 1) // length
    chosen = torch.linspace(0, count - 1, min(limit, count)).round().long() * length
    return torch.tensor(ids)[chosen[:, None] + torch.arange(length + 1)]


@torch.inference_mode()
def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return f32[N, V], the logits after every token. tokens: i64[B, T], N = B * T."""
    return model(tokens, use_cache=False).logits.flatten(0, 1)


def gumbel(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return standard Gumbel noise of this shape, the same for the same seed."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).clamp_(1e-20)
    return -(-uniform.log()).clamp_min_(1e-20).log_()


@torch.inference_mode()
def sample(model: PreTrainedModel, prompts: Tensor, new_tokens: int, *, temperature: float, seed: int) -> Tensor:
    """Continue each prompt by `new_tokens`; return i64[B, T + new_tokens].

    Token number t is argmax(log p + gumbel((B, V), seed + t)), t counted from the prompt's end; the largest logit at
    temperature 0. Nothing stops at end-of-text.
    """
    tokens, cache, fed = prompts, None, prompts
    for step in range(new_tokens):
        out = model(fed, past_key_values=cache, use_cache=True)
        scores, cache = out.logits[:, -1], out.past_key_values
        if temperature > 0:
            scores = scores / temperature + gumbel(tuple(scores.shape), seed + step)
        fed = scores.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, fed], 1)
    return tokens
