"""Configuration of online learning: how the draft learns while serving. Imports no jax."""

from __future__ import annotations

from typing import ClassVar, Literal

from adaserve_jax.settings import Panel, PathText, Settings, setting, settings

Loss = Literal["kl", "reverse_kl", "jsd"]
"""Distance of the draft's distribution q from the target's p: KL(p||q), KL(q||p), or a mixture between them."""


@settings
class LearnConfig(Settings):
    """Configuration of online learning. Raises ConfigError."""

    PANEL: ClassVar[Panel] = Panel.LEARNING

    learn_loss: Loss = setting(
        "kl", "distance that training makes smaller: kl (of the draft from the target), reverse_kl, or jsd"
    )
    learn_beta: float = setting(0.5, "weight of the target in the mixture of jsd, between 0 and 1", ge=0, le=1)
    learn_temperature: float = setting(1.0, "temperature at which both distributions are compared", gt=0)
    learn_positions: Literal["all", "wrong"] = setting(
        "all", "positions that are learned from: all, or wrong: only those where the draft was wrong"
    )
    learn_top_k: int = setting(
        64, "likeliest tokens of the target kept for each position; the others count as one", ge=1
    )
    learn_every: int = setting(8, "finished requests between two updates of a draft", ge=1)
    learn_steps: int = setting(4, "optimiser steps of one update, each on records drawn from the whole buffer", ge=1)
    learn_rate: float = setting(
        1e-4, "learning rate of AdamW: about 1e-4 for narrow traffic, 1e-5 for mixed chat; small drafts take more", gt=0
    )
    learn_lora_rank: int = setting(
        0, "rank of a low-rank update, trained instead of the weights themselves; 0: train all weights", ge=0
    )
    learn_buffer: int = setting(
        1024, "finished requests that are kept for training, for each draft; the oldest go first", ge=8
    )
    learn_held_out: float = setting(
        0.125, "share of the requests that is held out, to check an update before it serves", gt=0, lt=1
    )
    learn_tolerance: float = setting(
        0.01, "how much acceptance on held-out requests an update may cost and still serve", ge=0, le=1
    )
    learn_tenant_share: float = setting(
        0.5, "most of the buffer that one client's requests may take while others have any", ge=0, le=1
    )
    learn_delay_ms: float = setting(50.0, "most milliseconds by which one piece of training may delay a step", gt=0)
    learn_share: float = setting(0.25, "most of the time that training takes while requests run", ge=0, le=1)
    learn_folder: PathText | None = setting(
        None, "folder of checkpoints of drafts and optimisers, read at the start; none: what is learned is lost"
    )
    learn_keep_records: bool = setting(
        False, "keep the buffered requests in learn_folder too, texts included; otherwise none reach a disk"
    )

    def __post_init__(self) -> None:
        mixes = self.learn_loss != "jsd" or 0 < self.learn_beta < 1
        self._require(mixes, "learn_beta", "a number between 0 and 1 with learn_loss jsd, which is 0 at either end")
        kept = not self.learn_keep_records or self.learn_folder is not None
        self._require(kept, "learn_keep_records", "False without a learn_folder to keep them in")


@settings
class _LearnSwitch(Settings):
    """Makes `learn` the first option of its panel."""

    PANEL: ClassVar[Panel] = Panel.LEARNING

    learn: bool = setting(False, "drafts learn from what is served, in time that serving leaves over")


@settings
class LearnOptions(LearnConfig, _LearnSwitch):
    """LearnConfig as a command line or a file gives it: `learn` says whether drafts learn at all.

    The other fields may be set while it is off, so that a file can keep them.
    """

    def chosen(self) -> LearnConfig | None:
        """Return `EngineConfig.learning`."""
        return self.narrowed(LearnConfig) if self.learn else None

    def unused(self) -> list[str]:
        """Return the names of changed fields that have no effect because learning is off."""
        return [] if self.learn else self.changed()
