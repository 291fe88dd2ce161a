"""What single tokens spell, as bytes: a character may be spread over several of them. Imports no jax.

Decoding one token does not tell: part of a character becomes U+FFFD, and some decoders drop a leading space.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
Spelling = Callable[[str], bytes]
"""From a token, as the vocabulary writes it, to its bytes."""


def spelling_of(tokenizer: Any) -> Spelling | None:
    """How a transformers tokenizer writes bytes into its vocabulary; None: in neither of the two known ways.

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


def _byte_level() -> Spelling:
    """By GPT-2's table: printable characters stand for themselves, the other bytes in order for U+0100 and on."""
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
