"""Which characters a text of a report may have."""

from __future__ import annotations

import re

_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Text with U+FFFD in place of what neither XML nor HTML nor UTF-8 can hold; tabs and line breaks stay."""
    return _NOT_TEXT.sub("\ufffd", text)
