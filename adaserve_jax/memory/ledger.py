"""Memory ledger: bytes that an engine takes of one memory, part by part, and whether they fit.

The memory is that of the first device, which holds the draft beside its share of the target. If devices share one
memory, as CPU devices do, it is that of all of them and of the host. The bytes of models come from runtime/sizing.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from adaserve_jax.config import LEAST_CONTEXT, Quantize
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import Limits

MIB = 1 << 20
CGROUPS, MOUNTS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_LIMIT_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Limit files by the controller's name in /proc: version 2 has no name, version 1 its own."""


@dataclass(frozen=True)
class MemoryLimit:
    """Available memory.

    source: where the limit comes from. own_bytes: what the device or the process has, whatever was asked for.
    covers_host: copies on the host count too.
    """

    bytes: int
    source: str
    own_bytes: int
    covers_host: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes, in the one memory, of the parts of a configuration; draft_* are 0 without a draft.

    target_page, draft_page: KV of one page, all layers. reserve: for the workspace, as long as nothing is compiled that
    could measure it. quantized: the same with the target's weights in fewer bits, by the values of `quantize`, the
    better ones first. further_drafts: weights of all drafts but the first, whose pages they share. training: memory of
    online learning, whether drafts are resident or away; 0 without it. vocabulary_maps: tables from the target's
    vocabulary to the drafts', which stay while drafts are away; 0 if vocabularies are the same. adapters: room for LoRA
    adapters of the target. texts: host memory of texts that are drafted from, and of their indexes.
    """

    target_weights: int
    target_page: int
    draft_weights: int = 0
    draft_page: int = 0
    reserve: int = 0
    quantized: Mapping[Quantize, Sizes] = field(default_factory=dict)
    further_drafts: int = 0
    training: int = 0
    vocabulary_maps: int = 0
    adapters: int = 0
    texts: int = 0

    @property
    def page(self) -> int:
        """Bytes of a page in both models."""
        return self.target_page + self.draft_page

    def pages_within(self, limit: MemoryLimit, *, extends: bool) -> int:
        """Return the number of pages that fit beside weights, what the host holds where that counts, training, and
        reserve.

        0 if those do not fit themselves. extends: pages may take the drafts' place, which needs a copy of them.
        """
        on_host = self.texts + (self.drafts_weights if extends else 0)
        beside = self.adapters + self.vocabulary_maps + self.training + self.reserve
        taken = self.target_weights + self.drafts_weights + beside + (on_host if limit.covers_host else 0)
        return max(0, limit.bytes - taken) // self.page

    def extension_pages(self, num_pages: int) -> int:
        """Return N_draft, pages of the target that fit in the memory of the drafts' weights and of their KV of
        `num_pages` pages.

        Rounded down: the drafts leave no more than that. Source: Nightjar section 5, corrected (its ceiling overruns,
        and it forgets the draft's KV).
        """
        return (self.drafts_weights + num_pages * self.draft_page) // self.target_page

    @property
    def drafts_weights(self) -> int:
        """Bytes of the weights of all drafts."""
        return self.draft_weights + self.further_drafts

    def without_draft(self) -> Sizes:
        return self.without("draft_weights", "draft_page", "further_drafts", "training", "vocabulary_maps")

    def without(self, *parts: str) -> Sizes:
        """Return the sizes with these parts, names of fields, as 0."""
        quantized = {kind: sizes.without(*parts) for kind, sizes in self.quantized.items()}
        return replace(self, **dict.fromkeys(parts, 0), quantized=quantized)


@dataclass(frozen=True)
class Workspace:
    """Memory of programs beside weights and pages.

    bytes: the largest temporary and the largest result of any program, added, since the result of one exists while the
    next one runs, and arguments that are kept for them. by_tokens: what remains without the programs of longer steps,
    by packed length.
    """

    bytes: int
    by_tokens: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LedgerPart:
    """One line of the ledger. host_bytes: a copy on the host."""

    name: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Ledger:
    """Parts of an engine's memory against its limit.

    workspace: None before the programs are compiled. num_pages: of the base pool; the draft's own KV has as many.
    extension_pages: in the place of the draft, never beside it; 0: the draft stays, and needs no copy on the host.
    """

    sizes: Sizes
    limit: MemoryLimit
    num_pages: int
    extension_pages: int = 0
    workspace: Workspace | None = None

    def parts(self, *, expanded: bool = False) -> tuple[LedgerPart, ...]:
        """Return every part, with the draft resident or with pages in its place; without a draft it has no parts."""
        sizes, pages = self.sizes, self.num_pages
        copy = sizes.drafts_weights if self.extension_pages else 0
        away = (
            LedgerPart("extension pages", self.extension_pages * sizes.target_page),
            LedgerPart("draft weights (away)", 0, copy),
        )
        resident = (
            LedgerPart("draft weights", sizes.drafts_weights, copy),
            LedgerPart("draft KV pages", pages * sizes.draft_page),
        )
        return (
            LedgerPart("target weights", sizes.target_weights),
            *((LedgerPart("target adapters", sizes.adapters),) if sizes.adapters else ()),
            LedgerPart("target KV pages", pages * sizes.target_page),
            *(() if not sizes.draft_weights else away if expanded else resident),
            *((LedgerPart("draft vocabulary maps", sizes.vocabulary_maps),) if sizes.vocabulary_maps else ()),
            *((LedgerPart("draft training", sizes.training),) if sizes.training else ()),
            *((LedgerPart("texts to draft from", 0, sizes.texts),) if sizes.texts else ()),
            *(() if self.workspace is None else (LedgerPart("workspace", self.workspace.bytes),)),
        )

    def counted(self, part: LedgerPart) -> int:
        """Return the bytes of a part that count against the limit."""
        return part.device_bytes + (part.host_bytes if self.limit.covers_host else 0)

    def taken(self, *, expanded: bool = False) -> int:
        """Return the bytes of all parts that count against the limit."""
        return sum(self.counted(part) for part in self.parts(expanded=expanded))

    @property
    def known(self) -> int:
        """Bytes of the larger of both layouts, without a reserve."""
        layouts = (False, True) if self.extension_pages else (False,)
        return max(self.taken(expanded=each) for each in layouts)

    @property
    def needed(self) -> int:
        """Bytes of the larger of both layouts, with the reserve if the workspace is not known."""
        return self.known + (self.sizes.reserve if self.workspace is None else 0)

    @property
    def fits(self) -> bool:
        """True if the known parts fit."""
        return self.known <= self.limit.bytes


def check_fits(ledger: Ledger, limits: Limits) -> None:
    """Raise ConfigError unless the ledger fits its limit. limits: of the engine, which a change may lower."""
    if not ledger.fits:
        raise ConfigError(refusal(ledger, limits))


def refusal(ledger: Ledger, limits: Limits) -> str:
    """Return the message for a ledger that does not fit: each part, the limit, and changes that would make it fit.

    Each change that is named was tried on the ledger and is enough by itself.
    """
    parts = ", ".join(_say(part.name, ledger.counted(part), ledger) for part in ledger.parts())
    found = list(_changes(ledger, limits))
    advice = (
        f"to make it fit, change one of: {'; '.join(found)}"
        if found
        else "no smaller KV pool, quantised weights or engine without a draft would fit: use a smaller target or more "
        "memory"
    )
    return (
        f"the engine takes {mib(ledger.known)} of memory, but the limit is {mib(ledger.limit.bytes)} "
        f"({ledger.limit.source}): {parts}; {advice}"
    )


def mib(size: int) -> str:
    """Return the size in MiB, as text."""
    return f"{size / MIB:,.1f} MiB"


def _say(name: str, size: int, ledger: Ledger) -> str:
    pages = {"target KV pages": ledger.num_pages, "draft KV pages": ledger.num_pages}.get(name)
    return f"{name} {mib(size)}{'' if pages is None else f' ({pages})'}"


def _changes(ledger: Ledger, limits: Limits) -> Iterator[str]:
    """Yield single changes that are enough; if there are none, changes that are enough together."""
    smaller = list(_smaller_models(ledger))
    alone = [_fewer_pages(ledger, limits), _shorter_steps(ledger, limits)]
    enough = _first_kinds((words, words) for words, changed in smaller if changed.needed <= changed.limit.bytes)
    alone += [words for words in enough if not any(other != words and other in words for other in enough)]
    found = [change for change in alone if change is not None]
    if not found:
        pairs = [(words, _fewer_pages(changed, limits)) for words, changed in smaller]
        found = _first_kinds((words, f"{words} and {change}") for words, change in pairs if change is not None)
    yield from found
    least = -(-ledger.needed // MIB)
    if ledger.limit.bytes < least * MIB <= ledger.limit.own_bytes:
        yield f"memory_limit_mib at least {least}"


def _first_kinds(changes: Iterable[tuple[str, str]]) -> list[str]:
    """Return what belongs to the changes, of those that differ in the kind of weights alone to the first only."""
    found: dict[str, str] = {}
    for words, given in changes:
        found.setdefault(re.sub(r"quantize \w+", "quantize", words), given)
    return list(found.values())


def _smaller_models(ledger: Ledger) -> Iterator[tuple[str, Ledger]]:
    sizes = ledger.sizes
    if sizes.training:
        yield "learning none", _with(ledger, sizes.without("training"))
    if sizes.texts:
        yield "draft_sources model", _with(ledger, sizes.without("texts"))
    if sizes.adapters:
        yield "lora none and max_loras 0", _with(ledger, sizes.without("adapters"))
    if sizes.further_drafts:
        yield "drafts none", _with(ledger, sizes.without("further_drafts"))
    # what needs a draft goes with it
    no_draft = (
        "draft none" + " and drafts none" * bool(sizes.further_drafts) + " and learning none" * bool(sizes.training)
    )
    if sizes.draft_weights:
        yield no_draft, _with(ledger, sizes.without_draft())
    for kind, smaller in sizes.quantized.items():
        yield f"quantize {kind}", _with(ledger, smaller)
    for kind, smaller in sizes.quantized.items() if sizes.draft_weights else ():
        yield f"{no_draft} and quantize {kind}", _with(ledger, smaller.without_draft())


def _with(ledger: Ledger, sizes: Sizes) -> Ledger:
    """Return the ledger with other models. The workspace of their programs is taken to grow as their reserve does."""
    workspace = ledger.workspace
    if workspace is not None:
        workspace = Workspace(workspace.bytes + max(0, sizes.reserve - ledger.sizes.reserve))
    extends = ledger.extension_pages > 0 and sizes.draft_weights > 0
    extension = sizes.extension_pages(ledger.num_pages) if extends else 0
    return replace(ledger, sizes=sizes, extension_pages=extension, workspace=workspace)


def _fewer_pages(ledger: Ledger, limits: Limits) -> str | None:
    """Suggest as many pages as fit, with a context that they hold."""
    beside = replace(ledger, num_pages=0, extension_pages=0).needed  # weights and workspace
    if ledger.extension_pages and ledger.limit.covers_host:
        beside += ledger.sizes.drafts_weights
    pages = min(max(0, ledger.limit.bytes - beside) // ledger.sizes.page, ledger.num_pages)
    held = pages * limits.page_size
    if held < min(LEAST_CONTEXT, limits.max_context):
        return None
    if held >= limits.max_context:
        return f"num_pages at most {pages}"
    return f"num_pages at most {pages} and max_context at most {held}"


def _shorter_steps(ledger: Ledger, limits: Limits) -> str | None:
    """Suggest a maximum step length, if the programs of the longest steps are what does not fit."""
    if ledger.workspace is None:
        return None
    for tokens, left_bytes in sorted(ledger.workspace.by_tokens.items(), reverse=True)[1:]:
        if replace(ledger, workspace=Workspace(left_bytes)).needed <= ledger.limit.bytes:
            fewer = "" if tokens >= limits.max_requests else f" and max_requests at most {tokens}"
            return f"max_batch_tokens at most {tokens}{fewer}"
    return None


def process_memory() -> tuple[int, str]:
    """Return the bytes that this process may use and what limits them: its control groups, or the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = cgroup_limit()
    if allowed is not None and allowed < physical:
        return allowed, "the limit of the control group"
    return physical, "the machine's memory"


def cgroup_limit(cgroups: Path = CGROUPS, mounts: Path = MOUNTS) -> int | None:
    """Return the least memory limit of the control groups of this process and of those around them; None without a
    limit.

    cgroups: a file in the form of /proc/self/cgroup; mounts: folder of the groups' files.
    """
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & set(_LIMIT_FILES):
            limits += _limits_along(mounts / controller, path, _LIMIT_FILES[controller])
    return min(limits, default=None)


def _limits_along(mount: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and of those above it.

    In a container the group's path is often that of the host, while the files at the mount are its own.
    """
    folder = mount / path.lstrip("/")
    found = []
    for group in (each for each in (folder, *folder.parents) if each.is_relative_to(mount)):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            found.append(int(text))
    return found
