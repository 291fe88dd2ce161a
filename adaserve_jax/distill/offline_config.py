"""Settings of a distillation run from a file of prompts. Imports no jax."""

from __future__ import annotations

import math
from typing import Literal

from adaserve_jax.learn_config import LearnConfig, Loss
from adaserve_jax.settings import Settings, setting, settings


@settings
class OfflineConfig(Settings):
    """Settings of one run of `adaserve distill`. Raises ConfigError."""

    sampling: Literal["teacher", "student", "mixed"] = setting(
        "teacher", "who writes the texts: teacher (the target), student (the draft as it is by then), or mixed, "
        "token by token",
    )  # fmt: skip
    mix: float = setting(0.5, "share of the tokens that the target writes in mixed sampling", gt=0, lt=1)
    max_tokens: int = setting(128, "most tokens that are written after each prompt", ge=1)
    temperature: float = setting(1.0, "temperature at which texts are written; 0: always the likeliest token", ge=0)
    prompt_rows: bool = setting(
        False, "also learn from the positions of the prompts, not only from what is written after them"
    )
    loss: Loss = setting(
        "kl", "distance that training makes smaller: kl (of the draft from the target), reverse_kl, or jsd"
    )
    beta: float = setting(0.5, "weight of the target in the mixture of jsd", gt=0, lt=1)
    loss_temperature: float = setting(1.0, "temperature at which both distributions are compared", gt=0)
    top_k: int = setting(64, "likeliest tokens of the target kept for each position; the others count as one", ge=1)
    epochs: int = setting(2, "how often each prompt is learned from", ge=1)
    rate: float = setting(1e-4, "learning rate of AdamW at its highest; small drafts take more than large ones", gt=0)
    schedule: Literal["constant", "cosine"] = setting(
        "constant", "learning rate after the warm-up: constant, or cosine, which falls to 0 at the end"
    )
    warmup: float = setting(0.0, "share of the run in which the learning rate rises to its highest", ge=0, le=1)
    step_tokens: int = setting(2048, "tokens of one optimiser step, about", ge=1)
    lora_rank: int = setting(
        0, "rank of a low-rank update, trained instead of the weights themselves; 0: train all weights", ge=0
    )
    reset_top_layer: bool = setting(
        False, "first replace the draft's last layer by random weights: it forgets much of what it knew, and accepts "
        "far less until it is trained; for starting anew, and for experiments",
    )  # fmt: skip
    held_out: float = setting(
        0.125, "share of the prompts that is never trained on, and on which acceptance is measured", gt=0, lt=1
    )
    round_prompts: int = setting(
        64, "prompts whose texts are written, learned from and forgotten together; the student that writes is at "
        "most this many prompts old", ge=1,
    )  # fmt: skip
    rows: int = setting(32, "texts that are written side by side; fewer take less memory", ge=1)
    seed: int = setting(
        0, "decides what is held out, every draw and every order: same command, same draft",
        expected="an integer >= 0 of less than 64 bits", ge=0, lt=2**63,
    )  # fmt: skip

    def __post_init__(self) -> None:
        changed = self.changed()
        self._require(self.sampling == "mixed" or "mix" not in changed, "mix", "0.5 unless sampling is mixed")
        self._require(self.loss == "jsd" or "beta" not in changed, "beta", "0.5 unless loss is jsd")

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
        """Return the factor of the learning rate. progress: share of the run that is over, from 0 to 1."""
        if progress < self.warmup:
            return progress / self.warmup
        if self.schedule == "constant" or self.warmup == 1:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))
