"""What to say of a ledger that does not fit: each part, the limit, and changes that would make it fit, with numbers.

Every change that is named is enough by itself: it was tried on the ledger. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from adaserve_jax.config import LEAST_CONTEXT
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import MIB, Ledger, Sizes, Workspace


@dataclass(frozen=True)
class Shape:
    """The limits of an engine that a change may lower."""

    page_size: int
    max_context: int
    max_requests: int


def check_fits(ledger: Ledger, shape: Shape) -> None:
    """Raises ConfigError unless the ledger fits its limit."""
    if not ledger.fits:
        raise ConfigError(refusal(ledger, shape))


def refusal(ledger: Ledger, shape: Shape) -> str:
    parts = ", ".join(_say(part.name, ledger.counted(part), ledger) for part in ledger.parts())
    known = ledger.needed - (ledger.sizes.reserve if ledger.workspace is None else 0)
    found = list(_changes(ledger, shape))
    advice = (
        f"to make it fit, change one of: {'; '.join(found)}"
        if found
        else "no smaller KV pool, int8 weights or engine without a draft would fit: use a smaller target or more memory"
    )
    return (
        f"the engine takes {mib(known)} of memory, but the limit is {mib(ledger.limit.bytes)} ({ledger.limit.source}): "
        f"{parts}; {advice}"
    )


def mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def _say(name: str, size: int, ledger: Ledger) -> str:
    pages = {"target KV pages": ledger.num_pages, "draft KV pages": ledger.num_pages}.get(name)
    return f"{name} {mib(size)}{'' if pages is None else f' ({pages})'}"


def _changes(ledger: Ledger, shape: Shape) -> Iterator[str]:
    """Single changes that are enough; where none is, changes that are enough together."""
    smaller = list(_smaller_models(ledger))
    alone = [_fewer_pages(ledger, shape), _shorter_steps(ledger, shape)]
    enough = [words for words, changed in smaller if changed.needed <= changed.limit.bytes]
    alone += [words for words in enough if not any(other != words and other in words for other in enough)]
    found = [change for change in alone if change is not None]
    if not found:
        pairs = [(words, _fewer_pages(changed, shape)) for words, changed in smaller]
        found = [f"{words} and {change}" for words, change in pairs if change is not None]
    yield from found
    least = -(-ledger.needed // MIB)
    if ledger.limit.bytes < least * MIB <= ledger.limit.own_bytes:
        yield f"memory_limit_mib at least {least}"


def _smaller_models(ledger: Ledger) -> Iterator[tuple[str, Ledger]]:
    sizes = ledger.sizes
    if sizes.training:
        yield "learning none", _with(ledger, sizes.without_training())
    if sizes.further_drafts:
        yield "drafts none", _with(ledger, sizes.without_further_drafts())
    # what needs a draft goes with it
    no_draft = (
        "draft none" + " and drafts none" * bool(sizes.further_drafts) + " and learning none" * bool(sizes.training)
    )
    if sizes.draft_weights:
        yield no_draft, _with(ledger, sizes.without_draft())
    if sizes.int8 is not None:
        yield "quantize int8", _with(ledger, sizes.int8)
    if sizes.draft_weights and sizes.int8 is not None:
        yield f"{no_draft} and quantize int8", _with(ledger, sizes.int8.without_draft())


def _with(ledger: Ledger, sizes: Sizes) -> Ledger:
    """With other models. What their programs take is not known: as much more as their reserve is larger."""
    workspace = ledger.workspace
    if workspace is not None:
        workspace = Workspace(workspace.bytes + max(0, sizes.reserve - ledger.sizes.reserve))
    extension = ledger.extension_pages if sizes.draft_weights else 0
    return replace(ledger, sizes=sizes, extension_pages=extension, workspace=workspace)


def _fewer_pages(ledger: Ledger, shape: Shape) -> str | None:
    """As many pages as there is room for, with a context that they hold."""
    beside = replace(ledger, num_pages=0, extension_pages=0).needed  # weights and workspace
    if ledger.extension_pages and ledger.limit.covers_host:
        beside += ledger.sizes.drafts_weights
    pages = min(max(0, ledger.limit.bytes - beside) // ledger.sizes.page, ledger.num_pages)
    held = pages * shape.page_size
    if held < min(LEAST_CONTEXT, shape.max_context):
        return None
    if held >= shape.max_context:
        return f"num_pages at most {pages}"
    return f"num_pages at most {pages} and max_context at most {held}"


def _shorter_steps(ledger: Ledger, shape: Shape) -> str | None:
    """Without the programs of the longest steps, where these are what is too much."""
    if ledger.workspace is None:
        return None
    for tokens, size in sorted(ledger.workspace.by_tokens.items(), reverse=True)[1:]:
        if replace(ledger, workspace=Workspace(size)).needed <= ledger.limit.bytes:
            fewer = "" if tokens >= shape.max_requests else f" and max_requests at most {tokens}"
            return f"max_batch_tokens at most {tokens}{fewer}"
    return None
