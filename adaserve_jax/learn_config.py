"""How the draft learns while serving: frozen, validated, explicit. Imports no jax."""

# pyright: reportUnnecessaryIsInstance=false
# What users pass is looked at whatever its type says.
from __future__ import annotations

from dataclasses import dataclass, fields

from adaserve_jax.checked import Checked, is_finite, is_integer

LOSSES = ("kl", "reverse_kl", "jsd")
"""Distances of the draft's distribution from the target's: KL(p||q), KL(q||p), and what lies between them."""
POSITIONS = ("all", "overruled")
"""Of which positions of a text the target's scores are kept."""
LEAST = {"learn_every": 1, "learn_steps": 1, "learn_top_k": 1, "learn_buffer": 8, "learn_lora_rank": 0}
ABOVE_ZERO = ("learn_rate", "learn_temperature", "learn_delay_ms")
SHARES = ("learn_beta", "learn_held_out", "learn_share", "learn_tenant_share", "learn_tolerance")


@dataclass(frozen=True)
class LearnConfig(Checked):
    """What online learning is built from. Each field's help text is in FIELD_HELP. Raises ConfigError."""

    learn_loss: str = "kl"
    learn_beta: float = 0.5
    learn_temperature: float = 1.0
    learn_positions: str = "all"
    learn_top_k: int = 64
    learn_every: int = 8
    learn_steps: int = 4
    learn_rate: float = 1e-4
    learn_lora_rank: int = 0
    learn_buffer: int = 1024
    learn_held_out: float = 0.125
    learn_tolerance: float = 0.01
    learn_tenant_share: float = 0.5
    learn_delay_ms: float = 50.0
    learn_share: float = 0.25
    learn_folder: str | None = None
    learn_keep_records: bool = False

    def __post_init__(self) -> None:
        self._take_paths(["learn_folder"])
        self._check(self.learn_loss in LOSSES, "learn_loss", f"one of {', '.join(LOSSES)}")
        self._check(self.learn_positions in POSITIONS, "learn_positions", f"one of {', '.join(POSITIONS)}")
        for name, least in LEAST.items():
            self._check(is_integer(getattr(self, name), least), name, f"an integer >= {least}")
        for name in ABOVE_ZERO:
            self._check(is_finite(getattr(self, name)) and getattr(self, name) > 0, name, "a finite number above 0")
        for name in SHARES:
            value = getattr(self, name)
            self._check(is_finite(value) and 0 <= value <= 1, name, "a number from 0 to 1")
        mixes = self.learn_loss != "jsd" or 0 < self.learn_beta < 1
        self._check(mixes, "learn_beta", "a number between 0 and 1 with learn_loss jsd, which is 0 at either end")
        self._check(0 < self.learn_held_out < 1, "learn_held_out", "a number between 0 and 1")
        self._check(isinstance(self.learn_keep_records, bool), "learn_keep_records", "True or False")
        self._check(isinstance(self.learn_folder, str | None), "learn_folder", "a path")
        kept = not self.learn_keep_records or self.learn_folder is not None
        self._check(kept, "learn_keep_records", "False without a learn_folder to keep them in")


@dataclass(frozen=True)
class _Switch:
    learn: bool = False


@dataclass(frozen=True)
class LearnOptions(LearnConfig, _Switch):
    """LearnConfig as a command line or a file gives it: beside the fields, `learn` says whether drafts learn at all.

    Fields may be set while it is off, so that a file can keep them.
    """

    def chosen(self) -> LearnConfig | None:
        """What an engine takes as `learning`."""
        if not self.learn:
            return None
        return LearnConfig(**{f.name: getattr(self, f.name) for f in fields(LearnConfig)})

    def unused(self) -> list[str]:
        """The fields that say something, and to no effect, because learning is off."""
        return [] if self.learn else self.changed()


FIELD_HELP: dict[str, str] = {
    "learn_loss": "distance that training makes smaller: kl (of the draft from the target), reverse_kl, or jsd",
    "learn_beta": "weight of the target in the mixture of jsd, between 0 and 1",
    "learn_temperature": "temperature at which both distributions are compared",
    "learn_positions": "positions that are learned from: all, or only those where the target overruled the draft",
    "learn_top_k": "likeliest tokens of the target kept for each position; the others count as one",
    "learn_every": "finished requests between two updates of a draft",
    "learn_steps": "optimiser steps of one update, each on records drawn from the whole buffer",
    "learn_rate": "learning rate of AdamW: about 1e-4 for narrow traffic, 1e-5 for mixed chat; small drafts take more",
    "learn_lora_rank": "rank of a low-rank update, trained instead of the weights themselves; 0: train all weights",
    "learn_buffer": "finished requests that are kept for training, for each draft; the oldest go first",
    "learn_held_out": "share of the requests that is held out, to check an update before it serves",
    "learn_tolerance": "how much acceptance on held-out requests an update may cost and still serve",
    "learn_tenant_share": "most of the buffer that one client's requests may take while others have any",
    "learn_delay_ms": "most milliseconds by which one piece of training may delay a step",
    "learn_share": "most of the time that training takes while requests run",
    "learn_folder": "folder of checkpoints of drafts and optimisers, read at the start; none: what is learned is lost",
    "learn_keep_records": "keep the buffered requests in learn_folder too, texts included; otherwise none reach a disk",
}
OPTION_HELP: dict[str, str] = {
    "learn": "drafts learn from what is served, in time that serving leaves over",
    **FIELD_HELP,
}
"""The meaning of every field of LearnOptions."""
