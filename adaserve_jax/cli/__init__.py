"""The command `adaserve`. Reads options and prints; what a command does lives in the package that it names."""

from adaserve_jax.cli.app import main

__all__ = ["main"]
