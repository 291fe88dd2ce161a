"""API keys: the account of a secret, compared in constant time, and its limits on choices, requests and tokens.

Used from the event loop only.
"""

from __future__ import annotations

import hmac
import math
import os
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Literal

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.errors import ApiError, retry_after
from adaserve_jax.server.settings import KeySettings, ServerSettings, digest_of

_TOLERANCE = 1e-6


class RateLimited(ApiError):
    """429 of a key that is over one of its limits; Retry-After says when the same request has room."""

    def __init__(self, limit: Literal["requests", "inflight", "tokens"], allowed: str, wait_s: float):
        self.limit = limit
        super().__init__(
            429,
            f"this API key may have {allowed}; retry as Retry-After says",
            code="rate_limited",
            headers={"retry-after": retry_after(wait_s - _TOLERANCE)},
        )


class TokenBucket:
    """Token bucket that fills at `per_minute` up to what `burst_s` seconds bring (at least 1).

    used: amount that is missing at the start.
    """

    def __init__(
        self, per_minute: float, burst_s: float, clock: Callable[[], float] = time.monotonic, used: float = 0.0
    ):
        self._rate = per_minute / 60.0
        self._capacity = max(1.0, self._rate * burst_s)
        self._level = self._capacity - used
        self._clock = clock
        self._filled_s = clock()

    def take(self, amount: float) -> float:
        """Take `amount` and return 0; or take nothing and return the seconds until there is enough.

        An amount above the capacity is taken when the bucket is full and leaves a debt, so nothing is refused for ever.
        """
        self._fill()
        short = min(amount, self._capacity) - self._level
        if short > _TOLERANCE:
            return short / self._rate
        self._level -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        """Put back an amount that was taken and not used."""
        self._fill()
        self._level = min(self._capacity, self._level + amount)

    @property
    def used(self) -> float:
        """Amount that is missing until the bucket is full."""
        self._fill()
        return self._capacity - self._level

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._filled_s) * self._rate)
        self._filled_s = now


class Account:
    """Limits of one API key and what it has in use; without limits, the account of a server that asks for no key.

    salt_key: key under which the cache salts of its requests are hashed; empty: they stay as they are. may_learn:
    whether drafts may learn from its requests.
    """

    def __init__(
        self, limits: KeySettings | None = None, salt_key: bytes = b"", clock: Callable[[], float] = time.monotonic
    ):
        self.in_flight = 0
        self._salt_key = salt_key
        self._clock = clock
        self._requests = self._tokens = None
        self.set_limits(limits)

    def set_limits(self, limits: KeySettings | None) -> None:
        """Replace the limits. Choices stay in flight, and what was used of a rate counts against the new one."""
        self.limits = limits
        self.name = "" if limits is None else limits.name
        self.is_operator = limits is None or limits.operator
        self.may_learn = limits is None or limits.learn
        self.max_choices: float = math.inf if limits is None else limits.max_inflight or math.inf
        if limits is not None:
            self._requests = self._bucket(limits.requests_per_minute, limits.burst_s, self._requests)
            self._tokens = self._bucket(limits.tokens_per_minute, limits.burst_s, self._tokens)

    def _bucket(self, per_minute: float, burst_s: float, before: TokenBucket | None) -> TokenBucket | None:
        if not per_minute:
            return None
        return TokenBucket(per_minute, burst_s, self._clock, 0.0 if before is None else before.used)

    def begin_request(self) -> None:
        """Count one request. Raises RateLimited."""
        if self._requests is not None and (wait_s := self._requests.take(1)):
            assert self.limits is not None
            raise RateLimited("requests", f"{self.limits.requests_per_minute:g} requests per minute", wait_s)

    def require_room(self, choices: int) -> None:
        """Raise RateLimited when `choices` more may not be in flight."""
        if self.in_flight + choices > self.max_choices:
            allowed = f"{self.max_choices} choices in flight, has {self.in_flight} and asks for {choices}"
            raise RateLimited("inflight", allowed, 1)

    def charge(self, tokens: int) -> None:
        """Take `tokens`, the prompts' and the most that may be generated, from the rate. Raises RateLimited."""
        if self._tokens is not None and (wait_s := self._tokens.take(tokens)):
            assert self.limits is not None
            allowed = f"{self.limits.tokens_per_minute:g} tokens per minute, and {tokens} are asked for"
            raise RateLimited("tokens", allowed, wait_s)

    def give_back(self, tokens: int) -> None:
        """Return tokens that were charged and not generated to the rate."""
        if self._tokens is not None:
            self._tokens.give_back(tokens)

    def salt(self, cache_salt: str | None) -> str:
        """Return the salt of a request's cached KV: its own `cache_salt`, hashed under its API key.

        Requests that share both share pages, and can tell from `cached_tokens` what others sent.
        """
        salt = cache_salt or ""
        if not self._salt_key:
            return salt
        return blake2b(salt.encode(), key=self._salt_key, digest_size=16).hexdigest()


class Keyring:
    """Accounts of a server by API key; true when a key is asked for.

    anonymous is the account, without limits, of all requests where no key is asked for. Raises ConfigError when two
    keys have the same secret, or a secret is not where its settings say. environ: holds the secrets of `key_env`.
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
        """Take the keys of `settings`; known keys keep what they have in flight and used, under their new limits.

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
                accounts[digest].set_limits(limits)
        self._accounts = accounts

    def find(self, secret: bytes) -> Account | None:
        """Return the account of a secret; compares with every key's digest, so that the time tells nothing."""
        given = digest_of(secret)
        found = None
        for digest, account in self._accounts.items():
            if hmac.compare_digest(digest, given):
                found = account
        return found
