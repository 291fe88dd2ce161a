"""`adaserve` as its users run it, in this process."""

from __future__ import annotations

import functools
import sys

import pytest
import typer.main

from adaserve_jax.cli import app

# Typer builds its commands anew at every call, which takes a tenth of a second; they do not change.
typer.main.get_command = functools.cache(typer.main.get_command)


def run_program(*arguments: str) -> int:
    """Run `adaserve` with these arguments and return its exit status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["adaserve", *arguments])
        app.main()
    return int(ended.value.code or 0)
