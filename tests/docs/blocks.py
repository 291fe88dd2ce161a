"""The code blocks of the documents: those in fences, by language, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "console", "")
_PROMPT = re.compile(r"^(?:\w*\$ |\.venv/bin/|(?:[A-Z_]+=\S* )+)")
_END_OF_COMMAND = ("|", "||", "&", "&&", ";", ">", ">>", "2>", "<")


def blocks(document: Path, *languages: str) -> list[str]:
    """Contents of the fenced blocks of these languages, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def commands(document: Path, program: str) -> Iterator[list[str]]:
    """Arguments of every call of a program in the shell blocks of a document."""
    for block in blocks(document, *SHELL):
        for line in block.replace("\\\n", " ").splitlines():
            said = line.strip()
            while (rest := _PROMPT.sub("", said)) != said:
                said = rest
            if said.startswith(f"{program} "):
                words = shlex.split(said, comments=True)[1:]
                ends = [at for at, word in enumerate(words) if word in _END_OF_COMMAND]
                yield words[: ends[0]] if ends else words
