"""Ctrl-C ends the command line, whenever it comes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

DROPPED = """
    import signal, sys, time
    import adaserve_jax.cli as cli, adaserve_jax.cli.app as app

    class Callback:
        def __del__(self):
            raise KeyboardInterrupt

    def run():
        Callback()
        time.sleep(30)

    app.main = run
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without
    try:
        cli.main()
    except KeyboardInterrupt:
        sys.exit(7)
"""
WHILE_IMPORTING = """
    import sys
    import adaserve_jax.cli as cli

    class Finder:
        def find_spec(self, name, path, target=None):
            if name == "adaserve_jax.cli.app":
                raise KeyboardInterrupt

    sys.meta_path.insert(0, Finder())
    cli.main()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


def test_an_interrupt_that_a_callback_swallows_comes_again() -> None:
    assert run(DROPPED).returncode == 7


def test_an_interrupt_while_modules_are_imported_ends_quietly() -> None:
    ended = run(WHILE_IMPORTING)
    assert (ended.returncode, ended.stderr) == (130, "")
