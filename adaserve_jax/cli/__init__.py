"""The command `adaserve`. Reads options and prints; what a command does lives in the package that it names."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def main() -> None:
    """Run the command line; exits the process. Ctrl-C ends it whenever it comes."""
    sys.unraisablehook = _interrupt_again
    try:
        from adaserve_jax.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()


def _interrupt_again(dropped: UnraisableHookArgs) -> None:
    """Send a Ctrl-C again that Python dropped because it came in a callback, such as jax's at garbage collection."""
    if dropped.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident or 0
        threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)
