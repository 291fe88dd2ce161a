"""The tokenizer follows the checkpoint, and refuses what it cannot do with an error that a caller can act on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.errors import CheckpointError, RequestError
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from tests.models.checkpoints import byte_tokenizer, metaspace_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, byte_tokenizer())
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", ["the cat", " é 😀\x00\n\n\tthing", "", "1 , 2 . don 't"])
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.token_of())
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 0]) == "hi"
    assert [tokenizer.has_text(i) for i in (0, 3, tokenizer.vocab_size)] == [False, True, False]


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a"}]
    the_cat, a = tokenizer.encode("the cat"), tokenizer.encode("a")
    assert tokenizer.apply_chat_template(messages) == [1, *the_cat, 2, *a, 2]


BAD_MESSAGES: list[tuple[Any, str, str]] = [
    ([], r"messages must be a non-empty list, got \[\]", "messages"),
    ("hello", "messages must be a non-empty list, got 'hello'", "messages"),
    ([{"role": "user"}], r"messages\[0\] must have a string 'content', got None", "messages[0].content"),
    ([{"role": 3, "content": "x"}], r"messages\[0\] must have a string 'role', got 3", "messages[0].role"),
    (["hello"], r"messages\[0\] must have a string 'role', got None", "messages[0].role"),
    (
        [{"role": "tool", "content": "x"}],
        "the model's chat template refused the messages: role tool is not known",
        "messages",
    ),
]


@pytest.mark.parametrize(("messages", "text", "param"), BAD_MESSAGES)
def test_bad_messages_are_the_callers_error(tokenizer: Tokenizer, messages: Any, text: str, param: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        tokenizer.apply_chat_template(messages)
    assert (caught.value.param, caught.value.code) == (param, "invalid_messages")


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair at character 2") as caught:
        tokenizer.encode("ab\ud83d")
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_text")


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(), "{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="access to attribute '__class__' of 'list' object is unsafe"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(), None)
    with pytest.raises(RequestError, match="has no chat template; use the completions endpoint") as caught:
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])
    assert caught.value.code == "no_chat_template"


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"expected a tokenizer in tokenizer\.json or tokenizer\.model, found nei"
    ):
        Tokenizer.from_folder(tmp_path)
    write_tokenizer(tmp_path, byte_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="transformers cannot load the tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_nobody_is_told_to_install_what_nothing_needs(tmp_path: Path) -> None:
    """Where PyTorch is missing."""
    write_tokenizer(tmp_path, byte_tokenizer())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from adaserve_jax.models.tokenizer import Tokenizer\n"
        f"print(Tokenizer.from_folder({str(tmp_path)!r}).encode('ab'))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("[") and said.stderr == ""


def test_vocabularies_must_agree(tmp_path: Path, tokenizer: Tokenizer) -> None:
    check_same_vocabulary(tokenizer, tokenizer)
    write_tokenizer(tmp_path, metaspace_tokenizer())
    other = Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"but token 3 is '!' in .* and '<0x00>' in .*; use a draft made for"):
        check_same_vocabulary(tokenizer, other)
    longer = byte_tokenizer()
    longer.add_tokens(["more"])
    write_tokenizer(tmp_path, longer)
    with pytest.raises(CheckpointError, match=rf"token {tokenizer.vocab_size} is None in .* and 'more' in"):
        check_same_vocabulary(tokenizer, Tokenizer.from_folder(tmp_path))
