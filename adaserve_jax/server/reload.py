"""New API keys and certificates without a restart: on SIGHUP the configuration file is read again, of which only the
keys are taken, and the files of the certificate and its key."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState
from adaserve_jax.server.tls import check_tls

Reread = Callable[[], ServerSettings]
"""The settings as they are now in their file. Raises ConfigError."""
_log = logging.getLogger(__name__)


def reload_on_hangup(
    state: ServerState, reread: Reread | None, tls: Callable[[], ssl.SSLContext | None] = lambda: None
) -> None:
    """From now on SIGHUP takes the file's keys, where there is a file, and the certificate's files into what `tls`
    gives. Call it on the event loop of the main thread."""

    def hang_up() -> None:
        if reread is not None:
            reload_keys(state, reread)
        context = tls()
        if context is not None:
            reload_certificate(context, state.settings)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)


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


def reload_certificate(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """Take what the files of the certificate and its key hold now, for connections to come; what is wrong with them is
    logged, and then the old ones stay."""
    try:
        check_tls(settings)  # loads them elsewhere first: a pair that does not fit must not be taken in halves
        assert settings.tls_cert is not None
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (ConfigError, OSError) as error:
        _log.error("the certificate is as before: %s", error)
        return
    _log.warning("the server has read its certificate again")
