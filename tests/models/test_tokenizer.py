"""The tokenizer follows the checkpoint, and refuses what it cannot do with an error that a caller can act on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from adaserve_jax.errors import CheckpointError, RequestError
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from tests.models.checkpoints import ASSISTANT, EOS, USER, byte_tokenizer, metaspace_tokenizer, write_tokenizer


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


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], r"messages must be a non-empty list, got \[\]"),
        ([{"role": "tool", "content": "x"}], "the model's chat template refused the messages: role tool is not known"),
    ],
)
def test_bad_messages_are_the_callers_error(tokenizer: Tokenizer, messages: list[dict[str, str]], text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        tokenizer.apply_chat_template(messages)
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_messages")


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


def test_a_folder_with_a_processor_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"found only the processor of preprocessor_config\.json, which reads images"
    ):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_with_mistrals_own_file_alone_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    expected = r"found only tekken\.json, which is not read; put the tokenizer\.json of the model's page beside it, or"
    with pytest.raises(CheckpointError, match=expected):
        Tokenizer.from_folder(tmp_path)


def test_mistrals_own_library_does_not_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of what transformers does where mistral-common is installed and tekken.json lies beside tokenizer.json."""
    write_tokenizer(tmp_path, byte_tokenizer())
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | {"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "tekken.json").write_text("{}")

    from transformers import PreTrainedTokenizerFast

    class Auto:
        @staticmethod
        def from_pretrained(folder: Path, mistral_format: bool | None = None, **options: Any) -> Any:
            if mistral_format is not False:
                return SimpleNamespace(chat_template=None, get_vocab=lambda: {"a": 0})
            return PreTrainedTokenizerFast.from_pretrained(folder, **options)

    monkeypatch.setattr("transformers.AutoTokenizer", Auto)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


@pytest.mark.parametrize(
    ("config", "mark", "digits"),
    [
        ({"model_type": "mistral3", "transformers_version": "4.50.0"}, "[INST]", 3),
        ({"model_type": "mistral3", "transformers_version": "5.0.0"}, "[INST]", 1),  # written with the right rule
        ({"model_type": "mistral", "transformers_version": "4.50.0"}, "<|begin_of_text|>", 1),  # Llama 3's vocabulary
        ({"model_type": "qwen2", "transformers_version": "4.50.0"}, "[INST]", 1),
        ({}, "[INST]", 1),
    ],
)
def test_mistrals_digits_are_tokens_of_their_own(
    tmp_path: Path, config: dict[str, str], mark: str, digits: int
) -> None:
    """Mistral Small 3.1 and its relatives were published with a rule that cuts digits by threes."""
    words = {token: token_id for token_id, token in enumerate("123")} | {"12": 3, "123": 4}
    fillers = {f"filler {number}": len(words) + number for number in range(100_001)}
    backend = Backend(BPE(vocab=words | fillers, merges=[("1", "2"), ("12", "3")]))
    by_threes = Split(Regex(r"\p{N}{1,3}"), behavior="isolated")
    backend.pre_tokenizer = PreTokenizers([by_threes, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.add_special_tokens([mark])
    write_tokenizer(tmp_path, backend)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(Tokenizer.from_folder(tmp_path).encode("123")) == digits


def test_a_mistral_model_with_another_vocabulary_keeps_its_rules(tmp_path: Path) -> None:
    """Mistral's rule would cut this word at its hyphen; the rule of the file does not."""
    words = {"a": 0, "-": 1, "b": 2, "a-": 3, "a-b": 4}
    fillers = {f"filler {number}": len(words) + number for number in range(100_001)}
    backend = Backend(BPE(vocab=words | fillers, merges=[("a", "-"), ("a-", "b")]))
    whole = Split(Regex(r"\S+"), behavior="isolated")
    backend.pre_tokenizer = PreTokenizers([whole, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.add_special_tokens(["[INST]"])
    write_tokenizer(tmp_path, backend)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "transformers_version": "4.50.0"}))
    assert Tokenizer.from_folder(tmp_path).encode("a-b") == [4]


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"expected a tokenizer in tokenizer\.json or tokenizer\.model, found nei"
    ):
        Tokenizer.from_folder(tmp_path)
    write_tokenizer(tmp_path, byte_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="transformers cannot load the tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.slow
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
    rows = tokenizer.vocab_size + 1
    check_same_vocabulary(tokenizer, tokenizer, rows)
    write_tokenizer(tmp_path, metaspace_tokenizer())
    other = Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"but token 3 is '!' in .* and '<0x00>' in .*; use a draft made for"):
        check_same_vocabulary(tokenizer, other, rows)
    longer = byte_tokenizer()
    longer.add_tokens(["more"])
    write_tokenizer(tmp_path, longer)
    with pytest.raises(CheckpointError, match=rf"token {tokenizer.vocab_size} is None in .* and 'more' in"):
        check_same_vocabulary(tokenizer, Tokenizer.from_folder(tmp_path), rows)


def test_tokens_beyond_the_models_rows_are_of_no_account(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows, longer = tokenizer.vocab_size, byte_tokenizer()
    longer.add_tokens(["more"])
    write_tokenizer(tmp_path, longer)
    tuned = Tokenizer.from_folder(tmp_path)
    assert tuned.vocab_size == rows + 1
    check_same_vocabulary(tuned, tokenizer, rows)
    assert tuned.vocabulary_hash(rows) == tokenizer.vocabulary_hash(rows) == tokenizer.vocabulary_hash(rows + 1)
    assert tuned.vocabulary_hash(rows + 1) != tokenizer.vocabulary_hash(rows + 1)


def unigram_tokenizer() -> Backend:
    pieces = [
        (token, -1.0)
        for token in ("<unk>", EOS, USER, ASSISTANT, *"abceghiknrt ", "th", "the", "in", "ing", "hi", "thin")
    ]
    return Backend(Unigram(pieces, unk_id=0))


@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer, unigram_tokenizer])
def test_a_vocabulary_cut_to_the_models_rows_spells_texts_by_other_tokens(
    tmp_path: Path, make: Callable[[], Backend]
) -> None:
    whole, text = make(), "the thing"
    rows = whole.get_vocab_size() - 1
    whole.add_special_tokens(["<|pad|>"])
    write_tokenizer(tmp_path, whole)
    tuned = Tokenizer.from_folder(tmp_path)
    assert tuned.backend_json(rows + 2) == tuned.backend_json()
    for fewer in (rows + 1, rows, rows - 5):
        cut = Backend.from_str(tuned.backend_json(fewer))
        assert max(cut.get_vocab().values()) == fewer - 1
        found = cut.encode(text, add_special_tokens=False).ids
        spelled = (tuned.spelled(token) for token in found)
        assert b"".join(one for one in spelled if isinstance(one, bytes)).strip() == text.encode()
