"""How a draft is distilled from a file of prompts: frozen, validated, explicit. Imports no jax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LOSSES, LearnConfig

SAMPLING = ("teacher", "student", "mixed")
SCHEDULES = ("constant", "cosine")
_LEAST = {
    "top_k": 1, "epochs": 1, "max_tokens": 1, "step_tokens": 1, "lora_rank": 0, "round_prompts": 1, "rows": 1, "seed": 0
}  # fmt: skip


@dataclass(frozen=True)
class OfflineConfig:
    """What one run is made from. Each field's help text is in FIELD_HELP. Raises ConfigError."""

    sampling: str = "teacher"
    mix: float = 0.5
    max_tokens: int = 128
    temperature: float = 1.0
    prompt_rows: bool = False
    loss: str = "kl"
    beta: float = 0.5
    loss_temperature: float = 1.0
    top_k: int = 64
    epochs: int = 2
    rate: float = 1e-4
    schedule: str = "constant"
    warmup: float = 0.0
    step_tokens: int = 2048
    lora_rank: int = 0
    reset_top_layer: bool = False
    held_out: float = 0.125
    round_prompts: int = 64
    rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("sampling", SAMPLING), ("loss", LOSSES), ("schedule", SCHEDULES)):
            self._check(getattr(self, name) in choices, name, f"one of {', '.join(choices)}")
        for name, least in _LEAST.items():
            self._check(getattr(self, name) >= least, name, f"an integer >= {least}")
        for name in ("rate", "loss_temperature"):
            value = getattr(self, name)
            self._check(math.isfinite(value) and value > 0, name, "a finite number above 0")
        self._check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a finite number >= 0")
        for name in ("mix", "beta", "held_out"):
            self._check(0 < getattr(self, name) < 1, name, "a number between 0 and 1")
        self._check(0 <= self.warmup <= 1, "warmup", "a number from 0 to 1")

    def _check(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name.replace('_', '-')} must be {expected}, got {getattr(self, name)!r}")

    @property
    def target_share(self) -> float:
        """Chance of each drawn token to come from the target."""
        return {"teacher": 1.0, "student": 0.0, "mixed": self.mix}[self.sampling]

    @property
    def learn(self) -> LearnConfig:
        """The same settings as training takes them."""
        return LearnConfig(
            learn_loss=self.loss, learn_beta=self.beta, learn_temperature=self.loss_temperature,
            learn_top_k=self.top_k, learn_rate=self.rate, learn_lora_rank=self.lora_rank,
        )  # fmt: skip

    def rate_share(self, progress: float) -> float:
        """By what the learning rate is multiplied. progress: how much of the run is over, from 0 to 1."""
        if progress < self.warmup:
            return progress / self.warmup
        if self.schedule == "constant" or self.warmup == 1:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))


FIELD_HELP: dict[str, str] = {
    "sampling": "who writes the texts: teacher (the target), student (the draft as it is by then), or mixed, token by "
    "token",
    "mix": "share of the tokens that the target writes in mixed sampling",
    "max_tokens": "most tokens that are written after each prompt",
    "temperature": "temperature at which texts are written; 0: always the likeliest token",
    "prompt_rows": "also learn from the positions of the prompts, not only from what is written after them",
    "loss": "distance that training makes smaller: kl (of the draft from the target), reverse_kl, or jsd",
    "beta": "weight of the target in the mixture of jsd",
    "loss_temperature": "temperature at which both distributions are compared",
    "top_k": "likeliest tokens of the target kept for each position; the others count as one",
    "epochs": "how often each prompt is learned from",
    "rate": "learning rate of AdamW at its highest; small drafts take more than large ones",
    "schedule": "learning rate after the warm-up: constant, or cosine, which falls to 0 at the end",
    "warmup": "share of the run in which the learning rate rises to its highest",
    "step_tokens": "tokens of one optimiser step, about",
    "lora_rank": "rank of a low-rank update, trained instead of the weights themselves; 0: train all weights",
    "reset_top_layer": "first replace the draft's last layer by random weights: it forgets much of what it knew, and "
    "accepts far less until it is trained; for starting anew, and for experiments",
    "held_out": "share of the prompts that is never trained on, and on which acceptance is measured",
    "round_prompts": "prompts whose texts are written, learned from and forgotten together; the student that writes is "
    "at most this many prompts old",
    "rows": "texts that are written side by side; fewer take less memory",
    "seed": "decides what is held out, every draw and every order: same command, same draft",
}
