"""Other people's code on strangers' input: whatever it raises ends one request and not the engine. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from adaserve_jax.errors import AdaServeError

_log = logging.getLogger(__name__)


@contextmanager
def contained(field: str) -> Iterator[None]:
    """Log and turn into AdaServeError (engine_error) what is raised inside, but for errors of our own. field: of the
    request, whose work it is. A panic of native code is a BaseException and no Exception."""
    try:
        yield
    except (AdaServeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _log.exception("the engine failed on a request's %s", field)
        raise AdaServeError(f"the engine failed on this request's {field}; it goes on with the others") from error
