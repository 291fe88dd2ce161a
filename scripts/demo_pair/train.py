"""Train the demo pair: the target on text, the draft to match the target, both at once, then the draft alone.

The schedule follows the share of the wall-clock limit that has passed, so a busy machine makes fewer steps and still
decays fully. Every checkpoint holds a usable pair; a run resumes from the last one. One command: see README.md.
"""

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bpe import train_tokenizer
from corpus import EOS, MIX, documents
from llama import DRAFT, TARGET, Llama
from tokenizers import Tokenizer
from torch import Tensor

BATCH_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Shares of the wall clock at which things change, and peak learning rates."""

    warmup: float = 0.02
    decay_from: float = 0.40
    medium_from: float = 0.48
    long_from: float = 0.62
    freeze_from: float = 0.74
    target_lr: float = 2.5e-3
    draft_lr: float = 4e-3

    def target_rate(self, progress: float) -> float:
        """Learning rate of the target: warm up, hold, fall linearly to 2% at the freeze."""
        return self.target_lr * ramp(progress, self.warmup, self.decay_from, self.freeze_from)

    def draft_rate(self, progress: float) -> float:
        """Learning rate of the draft: warm up, hold until half time, then fall linearly to 2%."""
        return self.draft_lr * ramp(progress, self.warmup, 0.5, 1.0)

    def length(self, progress: float, rng: np.random.Generator) -> int:
        """Return the sequence length of the next batch: 256, then 512, later a mix up to 2048 (attention's cost is
        quadratic)."""
        if progress < self.medium_from:
            return 256
        return 512 if progress < self.long_from else int(rng.choice([512, 1024, 2048], p=[0.6, 0.25, 0.15]))


def ramp(progress: float, rise: float, hold: float, end: float) -> float:
    """Return a factor that rises to 1 at `rise`, stays until `hold` and falls to 0.02 at `end`."""
    fall = (end - progress) / (end - hold)
    return min(1.0, max(progress, 1e-3) / rise, max(fall, 0.02))


class Stream:
    """Random windows of training text, the sources drawn with the shares of MIX."""

    def __init__(self, tokens: dict[str, np.ndarray], seed: int):
        self.tokens = tokens
        self.rng = np.random.default_rng(seed)

    def batch(self, length: int) -> Tensor:
        """Return i64[B, length + 1] with B * length = BATCH_TOKENS."""
        kinds = self.rng.choice(list(MIX), size=BATCH_TOKENS // length, p=list(MIX.values()))
        rows = []
        for kind in kinds:
            source = self.tokens[kind]
            start = self.rng.integers(0, len(source) - length)
            rows.append(source[start : start + length + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def load_tokens(work: Path, gsm8k: Path) -> tuple[Tokenizer, dict[str, np.ndarray]]:
    """Return the tokenizer and the training tokens by kind; makes both, once, under `work`."""
    tokenizer_file, tokens_file = work / "tokenizer.json", work / "tokens.npz"
    if not tokens_file.exists():
        docs = [doc for doc in documents(gsm8k) if not doc.held_out]
        tokenizer = train_tokenizer(doc.text for doc in docs if doc.kind in ("lib", "maths"))
        tokenizer.save(str(tokenizer_file))
        end = tokenizer.token_to_id(EOS)
        arrays, rng = {}, np.random.default_rng(0)
        for kind in MIX:
            texts = [doc.text for doc in docs if doc.kind == kind]
            encoded = tokenizer.encode_batch([texts[i] for i in rng.permutation(len(texts))])
            arrays[kind] = np.concatenate([np.array([*e.ids, end], np.uint16) for e in encoded])
        np.savez(tokens_file, **arrays)
    with np.load(tokens_file) as stored:
        return Tokenizer.from_file(str(tokenizer_file)), dict(stored)


@torch.compile(dynamic=False)
def losses(target: Tensor, draft: Tensor, labels: Tensor, overlap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's loss, the draft's loss and the mean of sum min(p, q).

    target, draft: [N, V], logits; labels: i64[N]. The target learns the text. The draft learns KL(p || q) to the target
    (no gradient to the target) plus a little cross-entropy, plus `overlap` times 1 - sum min(p, q), the chance that
    speculation fails. Compiled only to fuse the passes over the vocabulary.
    """
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    target_loss = F.nll_loss(log_p, labels)
    known = log_p.detach()
    p = known.exp()
    divergence = (p * (known - log_q)).sum(-1).mean()
    draft_loss = 0.95 * divergence + 0.05 * F.nll_loss(log_q, labels)
    shared = torch.minimum(p, log_q.exp()).sum(-1).mean()
    return target_loss, draft_loss + overlap * (1 - shared), shared.detach()


class Optimizer:
    """Muon for the layers' matrices, AdamW for the embedding and the norms, at one learning rate."""

    def __init__(self, model: Llama):
        self.model = model
        named = dict(model.named_parameters())
        matrices = [w for name, w in named.items() if w.ndim == 2 and "embed" not in name]
        rest = [w for name, w in named.items() if w.ndim == 1 or "embed" in name]
        self.parts = (
            torch.optim.Muon(matrices, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )

    def step(self, rate: float) -> None:
        """Take one clipped step at this learning rate (Muon at 1.6 times it) and drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part, factor in zip(self.parts, (1.6, 1.0), strict=True):
            for group in part.param_groups:
                group["lr"] = rate * factor
            part.step()
            part.zero_grad()

    def state_dict(self) -> list[dict]:
        """Return the state of both parts."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Set the state of both parts."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class Trainer:
    """Both models, their optimizers and the counters; one step at a time."""

    def __init__(self, work: Path, stream: Stream, limit_s: float):
        torch.manual_seed(0)
        self.work, self.stream, self.limit_s, self.schedule = work, stream, limit_s, Schedule()
        self.target, self.draft = Llama(TARGET), Llama(DRAFT)
        self.target_opt, self.draft_opt = Optimizer(self.target), Optimizer(self.draft)
        self.steps = self.tokens = self.target_steps = self.target_tokens = 0
        self.elapsed_s = 0.0

    def step(self) -> dict[str, float]:
        """Train on one batch; return its losses."""
        progress = min(self.elapsed_s / self.limit_s, 1.0)
        frozen = progress >= self.schedule.freeze_from
        batch = self.stream.batch(self.schedule.length(progress, self.stream.rng))
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.set_grad_enabled(not frozen):
                target_logits = self.target(inputs).flatten(0, 1)
            draft_logits = self.draft(inputs).flatten(0, 1)
        overlap = 10.0 if frozen else 1.0
        target_loss, draft_loss, shared = losses(target_logits, draft_logits, labels, overlap)
        (draft_loss if frozen else target_loss + draft_loss).backward()
        if not frozen:
            self.target_opt.step(self.schedule.target_rate(progress))
            self.target_steps += 1
            self.target_tokens += BATCH_TOKENS
        self.draft_opt.step(self.schedule.draft_rate(progress))
        self.steps += 1
        self.tokens += BATCH_TOKENS
        return {"target": target_loss.item(), "draft": draft_loss.item(), "shared": shared.item()}

    def save(self) -> None:
        """Write the checkpoint atomically."""
        state = {name: getattr(self, name).state_dict() for name in ("target", "draft", "target_opt", "draft_opt")}
        state["counters"] = self.counters()
        partial = self.work / "checkpoint.pt.partial"
        torch.save(state, partial)
        os.replace(partial, self.work / "checkpoint.pt")

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        path = self.work / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            for name in ("target", "draft", "target_opt", "draft_opt"):
                getattr(self, name).load_state_dict(state[name])
            for name in ("steps", "tokens", "target_steps", "target_tokens", "elapsed_s"):
                setattr(self, name, state["counters"][name])
            self.stream.rng = np.random.default_rng(self.steps)

    def counters(self) -> dict[str, float | str]:
        """Return what the model card says of the run."""
        names = ("steps", "tokens", "target_steps", "target_tokens", "elapsed_s", "limit_s")
        return {name: getattr(self, name) for name in names} | {
            "batch_tokens": BATCH_TOKENS,
            "cores": os.cpu_count() or 0,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        }


def run(trainer: Trainer, *, save_every_s: float) -> None:
    """Train until the wall-clock limit, with a log line every 50 steps and a checkpoint every save_every_s."""
    saved_s, last, recent = trainer.elapsed_s, time.monotonic(), []
    with (trainer.work / "log.jsonl").open("a") as log:
        while trainer.elapsed_s < trainer.limit_s:
            recent.append(trainer.step())
            now = time.monotonic()
            trainer.elapsed_s, last = trainer.elapsed_s + now - last, now
            if len(recent) == 50:
                means = {name: round(sum(step[name] for step in recent) / len(recent), 4) for name in recent[0]}
                log.write(json.dumps({**trainer.counters(), **means}) + "\n")
                log.flush()
                recent = []
            if trainer.elapsed_s - saved_s >= save_every_s:
                trainer.save()
                saved_s = trainer.elapsed_s
    trainer.save()


def publish(work: Path, gsm8k: Path) -> None:
    """Export the last checkpoint into the package, measure it and fit its calibration, each in a process of its own."""
    for script, options in (
        ("export.py", ["--work", work]),
        ("evaluate.py", ["--gsm8k", gsm8k]),
        ("fit_calibration.py", ["--gsm8k", gsm8k]),
    ):
        subprocess.run([sys.executable, Path(__file__).with_name(script), *options], check=True)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl.gz")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokens, checkpoints and the log")
    parser.add_argument("--minutes", type=float, default=80.0, help="wall-clock limit; the schedule follows it")
    parser.add_argument("--train-only", action="store_true", help="do not export, measure and calibrate afterwards")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    _, tokens = load_tokens(args.work, args.gsm8k)
    print({kind: len(array) for kind, array in tokens.items()}, flush=True)
    trainer = Trainer(args.work, Stream(tokens, seed=0), args.minutes * 60)
    trainer.resume()
    run(trainer, save_every_s=120)
    if not args.train_only:
        publish(args.work, args.gsm8k)


if __name__ == "__main__":
    main()
