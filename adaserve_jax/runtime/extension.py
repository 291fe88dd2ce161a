"""How many KV pages the draft's memory makes while the draft is away, and whether this engine shall have them."""

from __future__ import annotations

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import Sizes
from adaserve_jax.pallas_kernels.paged_tree_attention.api import Implementation, reads_slabs
from adaserve_jax.types import Limits


def extension_pages(config: EngineConfig, limits: Limits, sizes: Sizes, attention: Implementation, swaps: bool) -> int:
    """N_draft: whole pages of the target that fit into the draft's weights and KV pool; 0: the draft stays.

    limits: without an extension. swaps: whether the policy has the draft give its memory to pages. Raises ConfigError:
    elastic is "on" where it cannot be.
    """
    has_draft = limits.max_depth > 0 and config.drafter is None
    if not has_draft or config.elastic == "off" or (config.elastic == "auto" and not (swaps and _runs_short(limits))):
        reason, pages = "" if has_draft else "there is no draft", 0
    else:
        reason, pages = _obstacle(config, attention), sizes.extension_pages(limits.num_pages)
        if not reason and not pages:
            reason = "the draft's memory is less than one page of the target"
    if reason and config.elastic == "on":
        raise ConfigError(f"elastic must be off or auto here, got 'on': {reason}")
    return 0 if reason else pages


def _obstacle(config: EngineConfig, attention: Implementation) -> str:
    """Why pools cannot be extended, or ""."""
    if config.num_processes > 1:
        return f"the target lies in {config.num_processes} processes; one must hold it alone"
    if config.tp > 1:
        return f"the target is divided over {config.tp} devices (tp), and the draft's memory is on the first only"
    if not reads_slabs(attention):
        return f"attention by {attention!r} reads one pool of pages; use attention xla"
    return ""


def _runs_short(limits: Limits) -> bool:
    """Whether the pool does not hold every request at its longest."""
    return limits.num_pages < limits.max_requests * limits.max_pages_per_request
