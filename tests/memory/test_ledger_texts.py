"""The memory of texts that are drafted from, in the ledger of a machine whose host memory counts."""

from __future__ import annotations

from adaserve_jax.memory.ledger import Ledger, MemoryLimit, Shape, Sizes, refusal

MIB = 1 << 20


def test_a_refusal_offers_to_do_without_texts_where_that_is_enough() -> None:
    sizes, limit = Sizes(target_weights=20 * MIB, target_page=MIB), MemoryLimit(32 * MIB, "asked for", 64 * MIB, True)
    ledger = Ledger(sizes, limit, num_pages=8, texts=10 * MIB)
    assert not ledger.fits and ledger.taken() == 38 * MIB
    said = refusal(ledger, Shape(page_size=64, max_context=64, max_requests=1))
    assert "texts to draft from 10.0 MiB" in said and "draft_sources none" in said
    assert Ledger(sizes, limit, num_pages=8).fits
