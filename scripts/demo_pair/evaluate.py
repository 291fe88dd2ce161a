"""Measure the exported pair on held-out text and write metrics.json and MODEL_CARD.md next to it."""

import argparse
import json
import math
import re
from pathlib import Path

import torch
from card import render
from corpus import ASSISTANT, USER
from pair import DEMO, Pair, gumbel, held_out_texts, load_pair, logits, windows
from torch import Tensor

WIDTHS = (1, 2, 4, 8)
TEMPERATURES = (1.0, 0.7)
DOMAINS = {"code": "lib", "prose": "maths"}
CODE_PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "import os\nimport sys\n\ndef main():\n    parser = argparse.ArgumentParser(",
)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Return f32[N], sum over the vocabulary of min(p, q). p, q: f32[N, V], probabilities."""
    return torch.minimum(p, q).sum(-1)


def deterministic(p: Tensor, q: Tensor) -> dict[int, Tensor]:
    """Return f32[N] by width: the target's probability of the draft's w likeliest tokens."""
    return {width: p.gather(-1, q.topk(width).indices).sum(-1) for width in WIDTHS}


def coupled(p: Tensor, q: Tensor, noise: Tensor) -> dict[int, Tensor]:
    """Return bool[N] by width: whether argmax(log p + g) is among the w largest of log q + g."""
    token = (p.log() + noise).argmax(-1, keepdim=True)
    ranked = (q.log() + noise).topk(max(WIDTHS)).indices
    return {width: (ranked[:, :width] == token).any(-1) for width in WIDTHS}


def greedy(p: Tensor, q: Tensor) -> dict[int, Tensor]:
    """Return bool[N] by width: whether the target's likeliest token is among the draft's w likeliest."""
    return {width: (q.topk(width).indices == p.argmax(-1, keepdim=True)).any(-1) for width in WIDTHS}


def measure(pair: Pair, tokens: Tensor) -> dict:
    """Return losses, overlap and per-node acceptance over these windows. tokens: i64[B, T + 1]."""
    sums: dict[str, float] = {}

    def add(name: str, values: Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + values.double().sum().item()

    for number, rows in enumerate(tokens.split(4)):
        labels = rows[:, 1:].flatten()
        target, draft = logits(pair.target, rows[:, :-1]), logits(pair.draft, rows[:, :-1])
        add("target_loss", torch.nn.functional.cross_entropy(target, labels, reduction="none"))
        add("draft_loss", torch.nn.functional.cross_entropy(draft, labels, reduction="none"))
        noise = gumbel(tuple(target.shape), number)
        for temperature in TEMPERATURES:
            p, q = (target / temperature).softmax(-1), (draft / temperature).softmax(-1)
            add(f"sum_min_t{temperature}", overlap(p, q))
            for rule, accepted in (("deterministic", deterministic(p, q)), ("coupled", coupled(p, q, noise))):
                for width, values in accepted.items():
                    add(f"{rule}_t{temperature}_w{width}", values)
        for width, values in greedy(target, draft).items():
            add(f"greedy_w{width}", values)
    count = tokens.numel() - len(tokens)
    text_bytes = sum(len(text.encode()) for text in pair.tokenizer.batch_decode(tokens[:, 1:]))
    means = {name: total / count for name, total in sums.items()}
    nats_to_bits = count / text_bytes / math.log(2)
    bits = {f"{name}_bits_per_byte": means[f"{name}_loss"] * nats_to_bits for name in ("target", "draft")}
    return {"tokens": count, "bytes": text_bytes} | {name: round(v, 4) for name, v in (means | bits).items()}


def complete(pair: Pair, prompts: list[str], new_tokens: int) -> list[str]:
    """Return the target's greedy continuation of each prompt, cut at end-of-text."""
    batch = pair.tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    new = pair.target.generate(**batch, max_new_tokens=new_tokens, do_sample=False)[:, batch["input_ids"].shape[1] :]
    return pair.tokenizer.batch_decode(new, skip_special_tokens=True)


def maths_answers(pair: Pair, texts: list[str]) -> dict:
    """Answer held-out questions greedily; return how many end in the `#### number` form and how many are right."""
    questions, answers = zip(*(text.split(ASSISTANT) for text in texts), strict=True)
    replies = complete(pair, [question + ASSISTANT for question in questions], 200)
    finals = [re.search(r"#### *(\S+)", reply) for reply in replies]
    right = sum(
        final is not None and final[1] == answer.split("#### ")[-1].strip()
        for final, answer in zip(finals, answers, strict=True)
    )
    return {"questions": len(texts), "finished": sum(final is not None for final in finals), "right": right}


def samples(pair: Pair, texts: dict[str, list[str]]) -> list[dict]:
    """Return greedy completions for the card: made-up code prompts, and held-out questions."""
    code = zip(CODE_PROMPTS, complete(pair, list(CODE_PROMPTS), 80), strict=True)
    shown = [{"kind": "code", "prompt": prompt, "completion": text} for prompt, text in code]
    questions = [text.split(ASSISTANT)[0].split(USER)[-1] for text in texts["maths_chat"][:2]]
    replies = complete(pair, [f"{USER}{question}{ASSISTANT}" for question in questions], 200)
    maths = zip(questions, replies, strict=True)
    return shown + [{"kind": "maths", "prompt": question, "completion": reply} for question, reply in maths]


def main() -> None:
    """Parse the command line, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl.gz")
    parser.add_argument("--pair", type=Path, default=DEMO)
    parser.add_argument("--windows", type=int, default=64, help="windows of 1024 tokens for each domain")
    parser.add_argument("--questions", type=int, default=100, help="held-out maths questions to answer")
    args = parser.parse_args()
    pair, texts = load_pair(args.pair), held_out_texts(args.gsm8k)
    training = json.loads((args.pair / "training.json").read_text())
    training["mean_batch_tokens"] = training["tokens"] / training["steps"]
    metrics = {
        "training": training,
        "parameters": {"target": pair.target.num_parameters(), "draft": pair.draft.num_parameters()},
        "held_out_documents": {kind: len(of_kind) for kind, of_kind in sorted(texts.items())},
        "held_out": {
            domain: measure(pair, windows(pair, texts[kind], length=1024, limit=args.windows))
            for domain, kind in DOMAINS.items()
        },
        "maths_answers": maths_answers(pair, texts["maths_chat"][: args.questions]),
        "samples": samples(pair, texts),
    }
    (args.pair / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    (args.pair / "MODEL_CARD.md").write_text(render(metrics), encoding="utf-8")


if __name__ == "__main__":
    main()
