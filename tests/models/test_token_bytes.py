"""The bytes of single tokens, joined, are the text, whatever way a tokenizer has of writing them."""

from __future__ import annotations

import pytest

from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from tests.models.checkpoints import byte_tokenizer, metaspace_tokenizer, write_tokenizer

TEXT = "the cat é 😀\x00\n\n\tthing 漢字"


@pytest.fixture(scope="module", params=[byte_tokenizer, metaspace_tokenizer], ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, request.param())
    return Tokenizer.from_folder(folder)


def joined(tokenizer: Tokenizer, text: str) -> bytes:
    spelled = [tokenizer.spelled(token) for token in tokenizer.encode(text)]
    return b"".join(one for one in spelled if isinstance(one, bytes))


def test_joined_they_are_the_text(tokenizer: Tokenizer) -> None:
    """SentencePiece begins a text with a space of its own."""
    assert joined(tokenizer, TEXT).removeprefix(b" ") == TEXT.encode()
    assert len(tokenizer.encode(TEXT)) > 10


def test_joined_they_are_the_text_of_the_embedded_pair() -> None:
    assert joined(Tokenizer.from_folder(resolve_folder("demo", "target")), TEXT) == TEXT.encode()


def test_parts_of_characters_are_bytes(tokenizer: Tokenizer) -> None:
    spelled = [tokenizer.spelled(token) for token in tokenizer.encode("漢")]
    assert b"".join(one for one in spelled if isinstance(one, bytes)).strip() == "漢".encode()
    assert b"\xe6" in spelled


def test_what_spells_nothing_has_a_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.spelled(0) == tokenizer.token_of()[0]
    assert tokenizer.spelled(tokenizer.vocab_size + 5) == f"token_id:{tokenizer.vocab_size + 5}"


def test_every_token_spells_what_decoding_it_shows(tokenizer: Tokenizer) -> None:
    """Where decoding a token alone gives whole characters: the same, but for a first space, which decoding may drop."""
    checked = 0
    for token in range(tokenizer.vocab_size):
        spelled, text = tokenizer.spelled(token), tokenizer.decode([token])
        if isinstance(spelled, bytes) and "\ufffd" not in text:
            assert spelled.decode().removeprefix(" ") == text.removeprefix(" ")
            checked += 1
    assert checked > 100
