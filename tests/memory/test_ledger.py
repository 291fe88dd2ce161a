"""The ledger's arithmetic by hand, and advice that is followed: every change that is named makes it fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import (
    MIB,
    Ledger,
    MemoryLimit,
    Sizes,
    Workspace,
    check_fits,
    refusal,
)
from adaserve_jax.types import Limits

SIZE = Limits(
    max_requests=8, token_edges=(256,), max_tree_tokens=64, max_context=128, page_size=16, num_pages=100, max_depth=0,
    max_width=0,
)  # fmt: skip
SIZES = Sizes(
    target_weights=400 * MIB, target_page=2 * MIB, draft_weights=50 * MIB, draft_page=MIB, reserve=30 * MIB,
    quantized={
        "int8": Sizes(100 * MIB, 2 * MIB, 50 * MIB, MIB, 60 * MIB),
        "int4": Sizes(60 * MIB, 2 * MIB, 50 * MIB, MIB, 60 * MIB),
    },
)  # fmt: skip


def of(limit_mib: int, *, pages: int = 100, own_mib: int = 10_000, **changes: object) -> Ledger:
    ledger = Ledger(SIZES, MemoryLimit(limit_mib * MIB, "memory_limit_mib", own_mib * MIB), pages)
    return replace(ledger, **changes)  # type: ignore[arg-type]


def test_parts_add_up_in_both_layouts() -> None:
    """The draft leaves 50 + 100 x 1 MiB, which is 75 pages of 2 MiB; its copy counts where the host's memory does."""
    assert SIZES.extension_pages(100) == 75
    assert Sizes(0, 4, 3, 4).extension_pages(1) == 1 and Sizes(0, 4, 1, 2).extension_pages(1) == 0  # rounded down
    ledger = of(800, extension_pages=75, workspace=Workspace(20 * MIB))
    resident = {part.name: (part.device_bytes // MIB, part.host_bytes // MIB) for part in ledger.parts()}
    assert resident == {
        "target weights": (400, 0), "target KV pages": (200, 0), "draft weights": (50, 50), "draft KV pages": (100, 0),
        "workspace": (20, 0),
    }  # fmt: skip
    expanded = {part.name: (part.device_bytes // MIB, part.host_bytes // MIB) for part in ledger.parts(expanded=True)}
    assert expanded == {
        "target weights": (400, 0), "target KV pages": (200, 0), "extension pages": (150, 0),
        "draft weights (away)": (0, 50), "workspace": (20, 0),
    }  # fmt: skip
    assert ledger.taken() == ledger.taken(expanded=True) == 770 * MIB and ledger.fits
    shared = replace(ledger, limit=replace(ledger.limit, covers_host=True))
    assert shared.taken() == shared.needed == 820 * MIB and not shared.fits
    assert of(750).needed == 780 * MIB and of(750).fits  # a reserve is no reason to refuse


def test_without_a_draft_there_is_no_part_of_it() -> None:
    ledger = replace(of(700), sizes=SIZES.without_draft())
    assert [part.name for part in ledger.parts()] == ["target weights", "target KV pages"]
    assert ledger.taken() == 600 * MIB


def test_pages_that_fit() -> None:
    """Of 780 MiB, 400 + 50 are weights and 30 are reserved; a page takes 3. What the host holds counts where the memory
    is its own: a copy of 50 where pages may take the draft's place, and texts of 20.
    """
    limit, with_texts = MemoryLimit(780 * MIB, "", 780 * MIB), replace(SIZES, texts=20 * MIB)
    on_host = replace(limit, covers_host=True)
    assert SIZES.pages_within(limit, extends=True) == with_texts.pages_within(limit, extends=True) == 100
    assert SIZES.pages_within(on_host, extends=False) == 100
    assert SIZES.pages_within(on_host, extends=True) == 250 // 3
    assert with_texts.pages_within(on_host, extends=False) == 280 // 3
    assert SIZES.pages_within(replace(limit, bytes=300 * MIB), extends=False) == 0


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        (
            of(700),
            r"the engine takes 750\.0 MiB of memory, but the limit is 700\.0 MiB \(memory_limit_mib\): target weights "
            r"400\.0 MiB, target KV pages 200\.0 MiB \(100\), draft weights 50\.0 MiB, draft KV pages 100\.0 MiB "
            r"\(100\); to make it fit, change one of: num_pages at most 73; draft none; quantize int8; "
            r"memory_limit_mib at least 780$",
        ),
        (of(495), r"one of: num_pages at most 5 and max_context at most 80; quantize int4; draft none and "
            r"quantize int8; memory"),
        (of(250), r"one of: quantize int8 and num_pages at most 13; draft none and quantize int8 and num_pages at "),
        (of(90), r"change one of: memory_limit_mib at least 780$"),
        (of(90, own_mib=90), r"; no smaller KV pool, quantised weights or engine without a draft would fit: use a "),
        (
            of(755, workspace=Workspace(40 * MIB, {4: 2 * MIB, 16: 5 * MIB, 64: 20 * MIB, 256: 40 * MIB})),
            r"workspace 40\.0 MiB; .*one of: num_pages at most 88; max_batch_tokens at most 16; draft none; quantize "
            r"int8; memory_limit_mib at least 790$",
        ),
        (
            of(753, workspace=Workspace(40 * MIB, {4: 2 * MIB, 256: 40 * MIB})),
            r"max_batch_tokens at most 4 and max_requests at most 4; ",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_parts_limit_and_changes(ledger: Ledger, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_fits(ledger, SIZE)


def test_what_learns_and_what_is_routed_to_may_go_alone_or_together() -> None:
    """Weights of 400, drafts of 50 and 30, 100 pages of 3, training of 60 and a reserve of 30 MiB: 870. Drafts none
    leaves 840, learning none 810, and draft none, with which both go, 630."""
    ledger = of(870)
    sizes = replace(ledger.sizes, further_drafts=30 * MIB, training=60 * MIB, quantized={})
    advice = {
        limit_mib: refusal(replace(ledger, sizes=sizes, limit=replace(ledger.limit, bytes=limit_mib * MIB)), SIZE)
        for limit_mib in (845, 815, 635)
    }
    no_draft = "draft none and drafts none and learning none"
    assert "; learning none; drafts none; memory_limit_mib" in advice[845]
    assert "; learning none; memory_limit_mib" in advice[815] and "drafts none;" not in advice[815]
    assert f"; {no_draft}; memory_limit_mib" in advice[635]


def test_pages_in_the_drafts_place_are_fewer_with_fewer_drafts() -> None:
    """Drafts of 50 and 150, and 100 pages of 2 + 1: both layouts take 900, or 750 with one draft."""
    sizes = replace(of(760).sizes, further_drafts=150 * MIB, reserve=0, quantized={})
    ledger = Ledger(sizes, of(760).limit, num_pages=100, extension_pages=sizes.extension_pages(100))
    assert ledger.known == 900 * MIB
    assert "; drafts none; " in refusal(ledger, SIZE)


sizes = st.integers(1, 300)


@settings(max_examples=25)
@given(
    weights=sizes, page=st.integers(1, 9), draft=st.integers(0, 100), draft_page=st.integers(1, 4), int8=sizes,
    int4=sizes, workspace=st.none() | st.integers(0, 90), pages=st.integers(1, 60), limit=st.integers(1, 700),
    extension=st.booleans(), covers_host=st.booleans(),
)  # fmt: skip
def test_every_change_that_is_named_is_enough(
    weights, page, draft, draft_page, int8, int4, workspace, pages, limit, extension, covers_host
):
    """Each is applied, word by word, to the ledger, whose sums are then taken anew."""
    draft_page = draft_page if draft else 0
    smaller = {"int8": min(int8, weights), "int4": min(int4, int8, weights)}
    quantized = {kind: Sizes(size, page, draft, draft_page, reserve=7) for kind, size in smaller.items()}
    ledger = Ledger(
        Sizes(weights, page, draft, draft_page, reserve=5, quantized=quantized),
        MemoryLimit(limit, "memory_limit_mib", limit, covers_host), pages,
        (draft + pages * draft_page) // page if extension and draft else 0,
        None if workspace is None else Workspace(workspace, {4: workspace // 2, 8: workspace}),
    )  # fmt: skip
    if ledger.fits:
        return check_fits(ledger, SIZE)
    text = refusal(ledger, SIZE)
    if "change one of: " not in text:
        return None
    for change in text.partition("change one of: ")[2].split("; "):
        changed = ledger
        if kind := re.search(r"quantize (\w+)", change):
            known = None if workspace is None else Workspace(workspace + 7 - ledger.sizes.reserve)
            changed = replace(changed, sizes=changed.sizes.quantized[kind[1]], workspace=known)
        if "draft none" in change:
            changed = replace(changed, sizes=changed.sizes.without_draft(), extension_pages=0)
        if found := re.search(r"num_pages at most (\d+)", change):
            fewer = int(found[1])
            assert 1 <= fewer <= pages
            more = replace(changed, num_pages=fewer + 1, extension_pages=min(changed.extension_pages, 0))
            changed = replace(changed, num_pages=fewer)
            if changed.extension_pages:
                changed = replace(changed, extension_pages=changed.sizes.extension_pages(fewer))
            elif fewer < pages:
                assert more.needed > limit  # as many as possible
        if "max_batch_tokens at most 4" in change:
            changed = replace(changed, workspace=Workspace(workspace // 2))
        assert changed.needed <= limit, change
    return None


def test_a_refusal_offers_to_do_without_texts_where_that_is_enough() -> None:
    sizes, limit = Sizes(target_weights=20 * MIB, target_page=MIB), MemoryLimit(32 * MIB, "asked for", 64 * MIB, True)
    ledger = Ledger(replace(sizes, texts=10 * MIB), limit, num_pages=8)
    assert not ledger.fits and ledger.taken() == 38 * MIB
    said = refusal(ledger, replace(SIZE, page_size=64, max_context=64, max_requests=1))
    assert "texts to draft from 10.0 MiB" in said and "draft_sources model" in said
    assert Ledger(sizes, limit, num_pages=8).fits
