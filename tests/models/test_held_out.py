"""The held-out text is the library's own, a few percent of it, by the hash of the path."""

from __future__ import annotations

import hashlib

import pytest

from adaserve_jax.models.held_out import held_out_code, is_held_out, library_files


def test_the_hash_decides() -> None:
    keys = [f"folder/file{number}.py" for number in range(3000)]
    held_out = [key for key in keys if is_held_out(key)]
    assert 50 < len(held_out) < 130
    assert all(int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) % 100 < 3 for key in held_out)


@pytest.mark.slow
def test_held_out_code_is_part_of_the_library_without_its_tests() -> None:
    by_text = {text: parts for parts, text in library_files()}
    texts = held_out_code()
    assert 0 < len(texts) < len(by_text) / 20
    assert sum(map(len, texts)) > 50_000
    for parts in map(by_text.__getitem__, texts):
        assert is_held_out("/".join(parts))
        assert not {"test", "tests", "site-packages"} & set(parts)
