"""New API keys without a restart: on SIGHUP the configuration file is read again, and only its keys are taken."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState

Reread = Callable[[], ServerSettings]
"""The settings as they are now in their file. Raises ConfigError."""
_log = logging.getLogger(__name__)


def reload_on_hangup(state: ServerState, reread: Reread) -> None:
    """From now on SIGHUP takes the file's keys. Call it on the event loop of the main thread."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_keys, state, reread)


def reload_keys(state: ServerState, reread: Reread) -> None:
    """Take the keys that `reread` has; what is wrong with them is logged, and then the old ones stay."""
    try:
        settings = reread()
        if not state.keyring:
            raise ConfigError("the server was started without API keys, so that it asks for none; restart it")
        if not settings.all_keys():
            raise ConfigError("at least one API key must be left; to ask for none, restart the server")
        state.keyring.replace(settings)
    except ConfigError as error:
        _log.error("the API keys are as before: %s", error)
        return
    _log.warning("the server has %d API keys now", len(settings.all_keys()))
