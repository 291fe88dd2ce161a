"""What an engine takes of one memory, part by part, in bytes.

One memory is that of the first device, which holds the draft beside its share of the target; where devices share one,
as those of a CPU do, it is that of all of them, and of the host. Knows neither models nor devices: who knows the bytes
is runtime/footprint.py. Imports no jax.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryLimit:
    """How much there is. source: where that is said. own_bytes: what the device or the process has, whatever was asked
    for. covers_host: whether copies on the host take of it too."""

    bytes: int
    source: str
    own_bytes: int
    covers_host: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes, in the one memory, of what a configuration is made of; draft_*: 0 without a draft.

    target_page, draft_page: KV of one page, all layers. reserve: for the workspace, while nothing is compiled that
    could say what it takes. int8: the same with the target's weights in int8; None: they are. further_drafts: weights
    of all drafts but the first, whose pages they share. training: what learning keeps and takes, whether drafts are
    there or away; 0 without it.
    """

    target_weights: int
    target_page: int
    draft_weights: int = 0
    draft_page: int = 0
    reserve: int = 0
    int8: Sizes | None = None
    further_drafts: int = 0
    training: int = 0

    @property
    def page(self) -> int:
        """A page in both models."""
        return self.target_page + self.draft_page

    def pages_within(self, limit: MemoryLimit) -> int:
        """Pages for which there is room beside the weights, the drafts' copies on the host where these count, training,
        and the reserve; 0 where these do not fit themselves."""
        copy = self.drafts_weights if limit.covers_host else 0
        taken = self.target_weights + self.drafts_weights + copy + self.training + self.reserve
        return max(0, limit.bytes - taken) // self.page

    def extension_pages(self, num_pages: int) -> int:
        """Of drafts that give up their weights and their KV of `num_pages` pages."""
        return extension_pages(self.drafts_weights, num_pages * self.draft_page, self.target_page)

    @property
    def drafts_weights(self) -> int:
        """Of all drafts."""
        return self.draft_weights + self.further_drafts

    def without_draft(self) -> Sizes:
        return self._without("draft_weights", "draft_page", "further_drafts", "training")

    def without_further_drafts(self) -> Sizes:
        return self._without("further_drafts")

    def without_training(self) -> Sizes:
        return self._without("training")

    def _without(self, *parts: str) -> Sizes:
        int8 = None if self.int8 is None else self.int8._without(*parts)
        return replace(self, **dict.fromkeys(parts, 0), int8=int8)


@dataclass(frozen=True)
class Workspace:
    """What programs take beside weights and pages: the largest temporary and the largest result of any of them, added,
    since the result of one is there while the next one runs, and arguments that are kept for them. by_tokens: what is
    left of it without the programs of longer steps, by packed length."""

    bytes: int
    by_tokens: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One line of the ledger. host_bytes: a copy on the host."""

    name: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Ledger:
    """workspace: None before the programs are compiled. num_pages: of the base pool; the draft's own KV has as many.
    extension_pages: in the place of the draft, never on top of it; 0: it stays, and needs no copy on the host."""

    sizes: Sizes
    limit: MemoryLimit
    num_pages: int
    extension_pages: int = 0
    workspace: Workspace | None = None

    def parts(self, *, expanded: bool = False) -> tuple[Part, ...]:
        """Every part, with the draft resident or with pages in its place. Without a draft there are none of it."""
        sizes, pages = self.sizes, self.num_pages
        copy = sizes.drafts_weights if self.extension_pages else 0
        away = (
            Part("extension pages", self.extension_pages * sizes.target_page),
            Part("draft weights (away)", 0, copy),
        )
        resident = (
            Part("draft weights", sizes.drafts_weights, copy),
            Part("draft KV pages", pages * sizes.draft_page),
        )
        return (
            Part("target weights", sizes.target_weights),
            Part("target KV pages", pages * sizes.target_page),
            *(() if not sizes.draft_weights else away if expanded else resident),
            *((Part("draft training", sizes.training),) if sizes.training else ()),
            *(() if self.workspace is None else (Part("workspace", self.workspace.bytes),)),
        )

    def counted(self, part: Part) -> int:
        """Bytes of a part that are held against the limit."""
        return part.device_bytes + (part.host_bytes if self.limit.covers_host else 0)

    def taken(self, *, expanded: bool = False) -> int:
        """Bytes of all parts that are held against the limit."""
        return sum(self.counted(part) for part in self.parts(expanded=expanded))

    @property
    def needed(self) -> int:
        """The larger of both layouts; with the reserve where the workspace is not known."""
        layouts = (False, True) if self.extension_pages else (False,)
        return max(self.taken(expanded=each) for each in layouts) + (
            self.sizes.reserve if self.workspace is None else 0
        )

    @property
    def fits(self) -> bool:
        """Judged by what is known: a reserve is not."""
        return self.needed - (self.sizes.reserve if self.workspace is None else 0) <= self.limit.bytes


def extension_pages(draft_weights: int, draft_kv: int, page_bytes: int) -> int:
    """Pages of the target that fit where the draft was: N_draft. All in bytes. Rounded down: what the draft leaves is
    all that there is. Source: Nightjar section 5, corrected (its ceiling overruns, and it forgets the draft's KV)."""
    return (draft_weights + draft_kv) // page_bytes
