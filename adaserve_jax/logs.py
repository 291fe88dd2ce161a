"""Lines of a process's log on stderr: time, level and message, the same for uvicorn's and our own."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Write warnings, and what uvicorn logs, with their times. Has no effect where logging is set up already."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
