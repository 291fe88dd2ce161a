"""`adaserve` as its users run it, in this process."""

from __future__ import annotations

import sys

import pytest

from adaserve_jax.cli import app


def run_program(*arguments: str) -> int:
    """Run `adaserve` with these arguments and return its exit status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["adaserve", *arguments])
        app.main()
    return int(ended.value.code or 0)
