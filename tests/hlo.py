"""What a compiled program's text says."""

from __future__ import annotations

import re


def instructions(hlo: str) -> list[str]:
    """All that a program does, without where in the sources it comes from."""
    lines = [re.sub(r",? ?(metadata=\{[^}]*\}|stack_frame_id=\d+)", "", line) for line in hlo.splitlines()]
    return [line for line in lines if " = " in line]
