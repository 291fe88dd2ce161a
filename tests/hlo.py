"""What a compiled program's text says of copies."""

from __future__ import annotations

import re


def copies_of(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions that produce an array of this shape by copying or converting."""
    text = re.escape(",".join(map(str, shape)))
    produced = re.findall(rf"(%\S+) = \w+\[{text}\]\S* ([\w-]+)\(", hlo)
    return [name for name, opcode in produced if re.search("copy|convert", opcode + name)]


def instructions(hlo: str) -> list[str]:
    """All that a program does, without where in the sources it comes from."""
    lines = [re.sub(r",? ?(metadata=\{[^}]*\}|stack_frame_id=\d+)", "", line) for line in hlo.splitlines()]
    return [line for line in lines if " = " in line]
