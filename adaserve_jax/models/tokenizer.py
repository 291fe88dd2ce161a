"""Text to token ids and back, with the checkpoint's own tokenizer and chat template, through transformers.

Code of a checkpoint never runs: remote code is off, and templates run in transformers' sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from adaserve_jax.errors import CheckpointError, RequestError, UnsupportedModelError
from adaserve_jax.models.chat_prompt import PLAIN_CHAT, ChatPrompt, TemplateProcesses
from adaserve_jax.models.config_values import read_json

_FILES = ("tokenizer.json", "tokenizer.model")
_TEKKEN_FILE = "tekken.json"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
    """A checkpoint's tokenizer. vocab_size: ids 0..vocab_size-1, added tokens included; a model may have more or fewer.
    longest_token: no token stands for more bytes of text. bos_token_id, eos_token_id, unk_token_id: of what begins and
    ends a text, and of what the vocabulary cannot write; None without one."""

    def __init__(self, tokenizer: Any, name: str):
        self._tokenizer = tokenizer
        self.name = name
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values())
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_ids: tuple[int, ...] = () if self.eos_token_id is None else (self.eos_token_id,)
        marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids: frozenset[int] = frozenset(marked.union(tokenizer.all_special_ids))
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self.longest_token = max(len(token.encode()) for token in vocabulary)
        self._spelling = _spelling_of(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._templates = TemplateProcesses()
        self._skip_special_tokens = True

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder. Raises CheckpointError: it is missing or unreadable."""
        folder = Path(folder)
        if not any((folder / name).is_file() for name in _FILES):
            only = [name for name in _PROCESSOR_FILES if (folder / name).is_file()]
            instead = f"only the processor of {only[0]}, which reads images or audio, not text" if only else "neither"
            if (folder / _TEKKEN_FILE).is_file():  # as transformers converts it, it puts no BOS token before a text
                instead = (
                    f"only {_TEKKEN_FILE}, which is not read; put the tokenizer.json of the model's page beside it, or "
                    "write one by transformers.integrations.mistral.convert_tekken_tokenizer and give it a BOS token"
                )
            raise CheckpointError(f"{folder}: expected a tokenizer in {' or '.join(_FILES)}, found {instead}")
        # Without PyTorch, transformers logs the advice to install it; nothing here needs it.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            loaded = _loader(folder)(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"{folder}: transformers cannot load the tokenizer: {error}") from error
        if loaded.chat_template is None:
            loaded.chat_template = _template_of_processor(folder)
        return cls(loaded, str(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the checkpoint puts around a text, or without.

        Raises RequestError: the text holds half of a surrogate pair.
        """
        return self._encode(text, add_special_tokens=add_special_tokens, param="prompt")

    def spell(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens, for bad_words.

        Raises RequestError, naming bad_words: the text holds half of a surrogate pair.
        """
        return self._encode(text, add_special_tokens=False, param="bad_words")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def has_text(self, token_id: int) -> bool:
        """Return False for special tokens, and for ids that the tokenizer does not have."""
        return token_id < self.vocab_size and token_id not in self.special_ids

    def id_of(self, text: str) -> int | None:
        """Return the id of the added token of this text, such as a mark of thinking; None: there is none."""
        return next((token_id for token_id, content in self._added.items() if content == text), None)

    def showing(self, texts: Collection[str]) -> Tokenizer:
        """Return a tokenizer that decodes special tokens of these texts, such as marks of tool calls, as text.

        It must be asked to decode no other special token: `has_text` tells which.
        """
        shown = {token_id for token_id in self.special_ids if self._added.get(token_id) in texts}
        if not shown:
            return self
        other = copy(self)
        other.special_ids = self.special_ids - shown
        other._skip_special_tokens = False
        return other

    def spelled(self, token_id: int) -> bytes | str:
        """Return the bytes of a token, which may be part of a character; the name of a token without text.

        Joined over the tokens of an output they are the UTF-8 of its text. Decoding a single token would not do: part
        of a character becomes U+FFFD, and some decoders drop a leading space.
        """
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None
        return self._spelled(token_id, token)

    def spelled_all(self, rows: int) -> dict[int, bytes | str]:
        """Return what `spelled` does for every id below `rows` that the tokenizer has."""
        return {token_id: self._spelled(token_id, token) for token_id, token in self.token_of(rows).items()}

    def _spelled(self, token_id: int, token: str | None) -> bytes | str:
        """Return the bytes or the name of a token, which the vocabulary writes as `token`."""
        if not self.has_text(token_id):
            return token or f"token_id:{token_id}"
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._spelling is None or token is None:
            return self.decode([token_id]).encode()
        return self._spelling(token)

    @property
    def chat_template(self) -> str:
        """Return the template of conversations with tools; empty if the model has none."""
        found = self._tokenizer.chat_template
        return (found.get("tool_use") or found.get("default") if isinstance(found, dict) else found) or ""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], prompt: ChatPrompt = PLAIN_CHAT) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's answer unless `prompt` says else.

        messages: mappings with "role" and "content", both strings, and "tool_calls" where the assistant called. Raises
        RequestError: there is no chat template or no message, or the template refuses the conversation; QueueFullError:
        too many templates of clients at once.
        """
        if not self._tokenizer.chat_template and prompt.template is None:
            raise RequestError(
                f"model {self.name} has no chat template; use the completions endpoint, or a chat model",
                param="messages",
                code="no_chat_template",
            )
        if not messages:
            raise RequestError("messages must be a non-empty list, got []", param="messages", code="invalid_messages")
        if prompt.template is not None:
            text = self._templates.render(prompt, messages, self._tokenizer.special_tokens_map)
        else:
            text = self._render(messages, prompt)
        return self._encode(text, add_special_tokens=prompt.add_special_tokens, param="messages")

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: ChatPrompt) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=list(prompt.tools) or None, tokenize=False,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message, **prompt.variables,
            )  # fmt: skip
        except Exception as error:  # a template is a program, and what messages and variables hold is the client's
            raise RequestError(
                f"the model's chat template refused the messages: {error}", param="messages", code="invalid_messages"
            ) from None

    def token_of(self, rows: int | None = None) -> dict[int, str]:
        """Return the token of every id, as the vocabulary writes it; of those below `rows` only, if given."""
        ids = self._tokenizer.get_vocab().items()
        return {token_id: token for token, token_id in ids if rows is None or token_id < rows}

    def vocabulary_hash(self, rows: int) -> str:
        """Return 16 hex digits, equal for tokenizers that give every id below `rows` the same meaning."""
        listed = json.dumps(sorted(self.token_of(rows).items()))
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def backend_json(self, rows: int | None = None) -> str:
        """Return the JSON of the `tokenizers` library, with the tokens below `rows` only, if given.

        Raises UnsupportedModelError: the tokenizer is of another library.
        """
        if self._backend is None:
            raise UnsupportedModelError(
                f"{self.name}: structured output needs a tokenizer of the `tokenizers` library (tokenizer.json), "
                f"got {type(self._tokenizer).__name__}"
            )
        whole: str = self._backend.to_str()
        return whole if rows is None or self.vocab_size <= rows else _without_tokens_from(whole, rows)

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} must be valid Unicode, got half of a surrogate pair at character {error.start}",
                param=param,
                code="invalid_text",
            ) from None
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)  # keeps no offsets
        return found.ids


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, rows: int, what: str = "the draft") -> None:
    """Raise CheckpointError, naming the first id, unless both models give every token id the same meaning.

    rows: of the target; ids from there on are in no prompt and never generated, so that their meaning is of no account.
    what: which draft must have it, for the message.
    """
    ours, theirs = target.token_of(rows), draft.token_of(rows)
    if ours == theirs:
        return
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise CheckpointError(
        f"{what} must have the same vocabulary as the target, but token {first} is {ours.get(first)!r} in "
        f"{target.name} and {theirs.get(first)!r} in {draft.name}; use a draft made for this target, or none"
    )


def _without_tokens_from(backend_json: str, rows: int) -> str:
    """Return a tokenizer's JSON without the tokens from `rows` on, so that it spells their texts by others."""
    whole = json.loads(backend_json)
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < rows]
    model, vocabulary = whole["model"], whole["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: the id is the place
        model["vocab"] = vocabulary[:rows]
        return json.dumps(whole)
    model["vocab"] = kept = {token: token_id for token, token_id in vocabulary.items() if token_id < rows}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())]
    model["merges"] = [[left, right] for left, right in pairs if {left, right, left + right} <= kept.keys()]
    return json.dumps(whole)


def _template_of_processor(folder: Path) -> str | None:
    """Return the chat template of a model of images and text, whose older folders have it in a file of its own."""
    path = folder / "chat_template.json"
    return read_json(path).get("chat_template") if path.is_file() else None


def _loader(folder: Path) -> Callable[..., Any]:
    """Return the function of transformers that loads a folder's tokenizer, imported late: it takes a second and more.

    A tokenizer.json of the general class is loaded by that class, by the rules in the file. AutoTokenizer would first
    import the configurations of models, and with them PyTorch where it is installed, which takes most of a start.
    """
    named = _setting(folder / "tokenizer_config.json", "tokenizer_class")
    options = {}
    if _setting(folder / "config.json", "model_type") in ("mistral", "mistral3"):
        options["fix_mistral_regex"] = _cuts_digits_by_threes(folder / "tokenizer.json")
    if named == "PreTrainedTokenizerFast" and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return partial(PreTrainedTokenizerFast.from_pretrained, **options)
    from transformers import AutoTokenizer

    # Where mistral-common is installed, tekken.json would be loaded by a class that does not list its added tokens.
    return partial(AutoTokenizer.from_pretrained, mistral_format=False, **options)


def _cuts_digits_by_threes(path: Path) -> bool:
    """Return whether a file is the tokenizer.json that Mistral published with Small 3.1 and its relatives.

    It cuts digits by threes, which the models do not. transformers has the right rule, and if it is asked to, puts it
    in the place of a file's first rule, whichever that is: a Mistral model with Llama 3's vocabulary must keep its own.
    """
    rules = (_setting(path, "pre_tokenizer") or {}).get("pretokenizers") or ({},)
    cuts = str((rules[0].get("pattern") or {}).get("Regex"))
    tokens = _setting(path, "added_tokens") or ()
    return r"\p{N}{1,3}" in cuts and any(token.get("content") == "[INST]" for token in tokens)


def _setting(path: Path, name: str) -> Any:
    """Return a value of a JSON file; None where there is none, or no such file."""
    try:
        return json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _spelling_of(tokenizer: Any) -> Callable[[str], bytes] | None:
    """Return the function from a token, as the vocabulary writes it, to its bytes; None: an unknown vocabulary.

    Byte-level BPE writes each byte as one printable character. SentencePiece writes a space as U+2581 and has tokens
    for single bytes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    kinds = set(re.findall(r'"type":\s*"(\w+)"', backend.decoder.__getstate__().decode()))
    if "ByteLevel" in kinds:
        return _byte_level()
    return _sentence_piece if kinds & {"ByteFallback", "Metaspace"} else None


def _byte_level() -> Callable[[str], bytes]:
    """Use GPT-2's table: printable characters stand for themselves, other bytes are U+0100 and up, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def spell(token: str) -> bytes:
        known = all(character in table for character in token)
        return bytes(table[character] for character in token) if known else token.encode()

    return spell


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
