"""All API keys of a server: finds the account that a secret belongs to, in time that tells nothing of the secrets."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Mapping

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.keys import KeySettings, digest_of
from adaserve_jax.server.limits import Account
from adaserve_jax.server.settings import ServerSettings


class Keyring:
    """The accounts of a server, by key; true when a key is asked for.

    anonymous: the account, without limits, of everybody where no key is asked for. environ: where the secrets of keys
    with `key_env` are. Raises ConfigError when two keys are the same secret, or one is not where its settings say.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] = os.environ,
    ):
        self.anonymous = Account()
        self._clock, self._environ = clock, environ
        self._accounts: dict[bytes, Account] = {}
        self.replace(settings)

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def replace(self, settings: ServerSettings) -> None:
        """Take the keys of `settings` from now on; one that was there goes on with what it has in flight and has used,
        under its limits now.

        Raises ConfigError, and then nothing changes.
        """
        keys: dict[bytes, KeySettings] = {}
        for limits in settings.all_keys():
            digest = limits.digest(self._environ)
            if digest in keys:
                raise ConfigError(
                    f"every API key must be another secret, got one secret for {keys[digest].name!r} "
                    f"and {limits.name!r}"
                )
            keys[digest] = limits
        accounts: dict[bytes, Account] = {}
        for digest, limits in keys.items():
            accounts[digest] = self._accounts.get(digest) or Account(limits, digest, self._clock)
            if accounts[digest].limits != limits:
                accounts[digest].limit(limits)
        self._accounts = accounts

    def find(self, secret: bytes) -> Account | None:
        """The account of a secret. Compares digests of one length with those of every key, whichever fits."""
        given = digest_of(secret)
        found = None
        for digest, account in self._accounts.items():
            if hmac.compare_digest(digest, given):
                found = account
        return found
