"""All API keys of a server: finds the account that a secret belongs to, in time that tells nothing of the secrets."""

from __future__ import annotations

import hmac
import math
import os
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Literal

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.settings import KeySettings, ServerSettings, digest_of

# What requests of one API key may take: room, requests and tokens per minute. Used from the event loop only.

_TOLERANCE = 1e-6


class RateLimited(ApiError):
    """A key is over one of its limits; Retry-After says when the same request has room. limit: which, for metrics."""

    def __init__(self, limit: Literal["requests", "inflight", "tokens"], allowed: str, wait_s: float):
        self.limit = limit
        super().__init__(
            429,
            f"this API key may have {allowed}; retry as Retry-After says",
            code="rate_limited",
            headers={"retry-after": str(max(1, math.ceil(wait_s - _TOLERANCE)))},
        )


class TokenBucket:
    """Fills at a rate, up to what `burst_s` seconds bring (at least 1), and is full at first but for what is `used`."""

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

        More than the bucket holds is taken when it is full, and leaves a debt, so that nothing is refused for ever.
        """
        self._fill()
        short = min(amount, self._capacity) - self._level
        if short > _TOLERANCE:
            return short / self._rate
        self._level -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        """Put back what was taken and not used."""
        self._fill()
        self._level = min(self._capacity, self._level + amount)

    @property
    def used(self) -> float:
        """What is missing until it is full."""
        self._fill()
        return self._capacity - self._level

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._filled_s) * self._rate)
        self._filled_s = now


class Account:
    """One key's limits and what it has in use; without limits, that of a server that asks for no key.

    salt_key: what the salts of its requests are made with; empty: they are those that the requests bring. may_learn:
    whether drafts may learn from its requests.
    """

    def __init__(
        self, limits: KeySettings | None = None, salt_key: bytes = b"", clock: Callable[[], float] = time.monotonic
    ):
        self.in_flight = 0
        self._salt_key = salt_key
        self._clock = clock
        self._requests = self._tokens = None
        self.limit(limits)

    def limit(self, limits: KeySettings | None) -> None:
        """Have these limits from now on. What is in flight stays so, and what was used of a rate is used of the new."""
        self.limits = limits
        self.name = "" if limits is None else limits.name
        self.is_operator = limits is None or limits.operator
        self.may_learn = limits is None or limits.learn
        self.most_choices: float = math.inf if limits is None else limits.max_inflight or math.inf
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

    def hold(self, choices: int) -> Hold:
        """Count `choices` as in flight. Raises RateLimited."""
        if self.in_flight + choices > self.most_choices:
            allowed = f"{self.most_choices} choices in flight, has {self.in_flight} and asks for {choices}"
            raise RateLimited("inflight", allowed, 1)
        self.in_flight += choices
        return Hold(self, choices)

    def charge(self, tokens: int) -> None:
        """Take `tokens`: those of the prompts, and the most that may be generated. Raises RateLimited."""
        if self._tokens is not None and (wait_s := self._tokens.take(tokens)):
            assert self.limits is not None
            allowed = f"{self.limits.tokens_per_minute:g} tokens per minute, and {tokens} are asked for"
            raise RateLimited("tokens", allowed, wait_s)

    def give_back(self, tokens: int) -> None:
        """Tokens that were charged and not generated."""
        if self._tokens is not None:
            self._tokens.give_back(tokens)

    def salt(self, cache_salt: str | None) -> str:
        """What separates a request's cached KV from others': the salt that it brings, under the key that it came with.

        Those that share both share pages, and can tell from `cached_tokens` what others sent.
        """
        salt = cache_salt or ""
        if not self._salt_key:
            return salt
        return blake2b(salt.encode(), key=self._salt_key, digest_size=16).hexdigest()


class Hold:
    """What one HTTP request has of its account; given back choice by choice, or all at once, never more than it has."""

    def __init__(self, account: Account, choices: int):
        self._account = account
        self._choices = choices

    def end(self, unused_tokens: int) -> None:
        """One choice has ended; it was allowed so many tokens more than it generated."""
        self._release(min(1, self._choices), unused_tokens)

    def drop(self, choices: int | None = None, unused_tokens: int = 0) -> None:
        """So many choices, or all that are left, never begin; so many tokens were charged for them."""
        self._release(self._choices if choices is None else min(choices, self._choices), unused_tokens)

    def _release(self, choices: int, tokens: int) -> None:
        self._choices -= choices
        self._account.in_flight -= choices
        self._account.give_back(tokens)


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
