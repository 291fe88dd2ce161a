"""Who may speak to a draft service, how much, and what was refused. Tokens are read from a file and kept as digests.

Knows no gRPC. Nothing here is ever logged: neither tokens nor what targets say.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address

from adaserve_jax.certificates import check_certificates, read_file
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.settings import DraftServiceSettings, host_port

AUTHORIZATION = "authorization"
"""Name of the metadata that carries "Bearer TOKEN"."""
_SCHEME = "bearer "
MIN_TOKEN = 16
"""Characters; shorter ones can be guessed."""


class Tokens:
    """The tokens that are accepted, by their digests."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    @staticmethod
    def from_file(path: str) -> Tokens:
        """One token a line; empty lines and those that begin with # are left out. Raises ConfigError, which tells no
        token."""
        try:
            text = read_file("token_file", path).decode("ascii")
        except UnicodeDecodeError:
            raise ConfigError(f"token_file must hold tokens of ASCII characters, got others in {path}") from None
        tokens = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if not tokens:
            raise ConfigError(f"token_file must hold at least one token, got none in {path}")
        if any(len(token) < MIN_TOKEN or len(token.split()) > 1 for token in tokens):
            raise ConfigError(
                f"token_file must hold one token of at least {MIN_TOKEN} characters in each line, got another line in "
                f"{path}; make one with: openssl rand -hex 32"
            )
        return Tokens(tokens)

    def identify(self, authorization: str) -> str | None:
        """A name for whose token it is, the same in every run with that file; None: nobody's. All are compared, each in
        constant time."""
        found = None
        given = _digest(authorization[len(_SCHEME) :].strip())
        for number, digest in enumerate(self._digests, 1):
            if hmac.compare_digest(digest, given):
                found = number
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        return f"token-{found}" if found is not None and is_bearer else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def check_secured(settings: DraftServiceSettings) -> None:
    """Raise ConfigError where others than this machine could use the draft, or files of certificates are wrong."""
    host, _ = host_port("listen", settings.listen)
    guarded = settings.token_file is not None or settings.tls_client_ca is not None or settings.insecure
    if not guarded and not is_loopback(host):
        raise ConfigError(
            f"listen must be on loopback without a token and without client certificates, got {settings.listen!r}: "
            "whoever reaches the port could use the draft; give token_file or tls_client_ca, or insecure where the "
            "network is closed"
        )
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it: every address that the name stands for is loopback's. Raises ConfigError:
    there is no such host."""
    try:
        return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError) as error:
        raise ConfigError(f"there is no host {host!r} to listen on; give one of this machine's addresses") from error


class Audit:
    """Counts streams, and what was refused, by why. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self.opened = 0

    def refuse(self, why: str) -> None:
        """One stream was refused or ended for what it did."""
        with self._lock:
            self._refused[why] += 1

    def refused(self) -> dict[str, int]:
        """Streams by why they were refused or ended."""
        with self._lock:
            return dict(self._refused)

    def open(self, peer: str, most: int, most_per_peer: int) -> str:
        """A stream of this peer begins: "", or why it may not."""
        with self._lock:
            if self._streams.total() >= most:
                return f"{most} targets are connected, as many as may be"
            if self._streams[peer] >= most_per_peer:
                return f"{most_per_peer} connections of this peer are open, as many as one may have"
            self._streams[peer] += 1
            self.opened += 1
            return ""

    def close(self, peer: str) -> None:
        """A stream that `open` let in has ended."""
        with self._lock:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    @property
    def streams(self) -> int:
        """Open now."""
        with self._lock:
            return self._streams.total()
