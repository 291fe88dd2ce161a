"""Text to token ids and back, with the checkpoint's own tokenizer and chat template, through transformers.

Code of a checkpoint never runs: remote code is off, and templates run in transformers' sandbox.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from adaserve_jax.errors import CheckpointError, RequestError, UnsupportedModelError

_FILES = ("tokenizer.json", "tokenizer.model")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
    """A checkpoint's tokenizer. vocab_size: ids 0..vocab_size-1, added tokens included; a model may have more."""

    def __init__(self, tokenizer: Any, name: str):
        self._tokenizer = tokenizer
        self.name = name
        self.vocab_size: int = len(tokenizer)
        self.eos_token_ids: tuple[int, ...] = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids: frozenset[int] = frozenset(marked.union(tokenizer.all_special_ids))
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._spelling = _spelling_of(tokenizer)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder. Raises CheckpointError: it is missing or unreadable."""
        folder = Path(folder)
        if not any((folder / name).is_file() for name in _FILES):
            raise CheckpointError(f"{folder}: expected a tokenizer in {' or '.join(_FILES)}, found neither")
        auto_tokenizer = _auto_tokenizer()
        try:
            loaded = auto_tokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"{folder}: transformers cannot load the tokenizer: {error}") from error
        return cls(loaded, str(folder))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the checkpoint puts around a text.

        Raises RequestError: the text holds half of a surrogate pair.
        """
        return self._encode(text, add_special_tokens=True, param="prompt")

    def spell(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens, for bad_words.

        Raises RequestError, naming bad_words: the text holds half of a surrogate pair.
        """
        return self._encode(text, add_special_tokens=False, param="bad_words")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def has_text(self, token_id: int) -> bool:
        """Return False for special tokens, and for ids that the tokenizer does not have."""
        return token_id < self.vocab_size and token_id not in self.special_ids

    def spelled(self, token_id: int) -> bytes | str:
        """Return the bytes of a token, which may be part of a character; the name of a token without text.

        Joined over the tokens of an output they are the UTF-8 of its text. Decoding a single token would not do: part
        of a character becomes U+FFFD, and some decoders drop a leading space.
        """
        if not self.has_text(token_id):
            token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None
            return token or f"token_id:{token_id}"
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if self._spelling is None or token is None:
            return self.decode([token_id]).encode()
        return self._spelling(token)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's answer.

        messages: mappings with "role" and "content", both strings. Raises RequestError: the model has no chat
        template, a message is malformed, or the template refuses the conversation.
        """
        if not self._tokenizer.chat_template:
            raise RequestError(
                f"model {self.name} has no chat template; use the completions endpoint, or a chat model",
                param="messages",
                code="no_chat_template",
            )
        _check_messages(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", param="messages", code="invalid_messages"
            ) from None
        return self._encode(text, add_special_tokens=False, param="messages")

    def token_of(self) -> dict[int, str]:
        """Return every id's token, as the vocabulary writes it."""
        return {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}

    @property
    def vocabulary_hash(self) -> str:
        """Return 16 hex digits, equal for tokenizers that give every id the same meaning."""
        listed = json.dumps(sorted(self.token_of().items()))
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def backend_json(self) -> str:
        """Return the JSON of the `tokenizers` library. Raises UnsupportedModelError: it is of another library."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError(
                f"{self.name}: structured output needs a tokenizer of the `tokenizers` library (tokenizer.json), "
                f"got {type(self._tokenizer).__name__}"
            )
        return backend.to_str()

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} must be valid Unicode, got half of a surrogate pair at character {error.start}",
                param=param,
                code="invalid_text",
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise CheckpointError, naming the first id, unless both models give every token id the same meaning."""
    ours, theirs = target.token_of(), draft.token_of()
    if ours == theirs:
        return
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise CheckpointError(
        f"target and draft must have the same vocabulary, but token {first} is {ours.get(first)!r} in {target.name} "
        f"and {theirs.get(first)!r} in {draft.name}; use a draft made for this target, or none"
    )


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    ok = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not ok:
        raise RequestError(
            f"messages must be a non-empty list, got {messages!r}", param="messages", code="invalid_messages"
        )
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise RequestError(
                    f"messages[{index}] must have a string {key!r}, got {value!r}",
                    param=f"messages[{index}].{key}",
                    code="invalid_messages",
                )


def _auto_tokenizer() -> Any:
    """Import transformers, late: it takes a second, which `--help` should not pay.

    Without PyTorch, transformers logs the advice to install it; nothing here needs it.
    """
    log = logging.getLogger("transformers")
    log.addFilter(_is_not_advice)
    try:
        from transformers import AutoTokenizer
    finally:
        log.removeFilter(_is_not_advice)
    return AutoTokenizer


def _is_not_advice(record: logging.LogRecord) -> bool:
    return "Models won't be available" not in record.getMessage()


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
