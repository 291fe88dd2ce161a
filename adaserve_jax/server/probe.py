"""Health check for containers: `python -m adaserve_jax.server.probe /ready` exits with 0 when the server answers 200.

It asks the host and port of ADASERVE_HOST and ADASERVE_PORT, by https where ADASERVE_TLS_CERT is set. The API key,
which `/ready` may ask for, comes from ADASERVE_PROBE_KEY. A server with `tls_client_ca` asks for a certificate too: the
PEM files ADASERVE_PROBE_TLS_CERT and ADASERVE_PROBE_TLS_KEY.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

TIMEOUT_S = 3.0
LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to ask in place of none, and of those that stand for every address."""


def probe(
    path: str, host: str, port: int, *, tls: bool = False, certificate: tuple[str, str] | None = None, key: str = ""
) -> int:
    """Return the status of a GET to this machine's server. Raises OSError and HTTPException when none answers.

    tls: use https; the server's certificate is not checked, since the port is this machine's own. certificate: PEM
    files of the probe's own certificate and its key.
    """
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate is not None:
            context.load_cert_chain(*certificate)
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    finally:
        connection.close()


def main() -> None:
    """Exit with 0 for a 200, else with 1 and a message on stderr."""
    environment = os.environ
    path = sys.argv[1] if len(sys.argv) > 1 else "/health"
    host, port = environment.get("ADASERVE_HOST", ""), int(environment.get("ADASERVE_PORT", "8000"))
    tls = environment.get("ADASERVE_TLS_CERT", "none") not in ("", "none")
    own = environment.get("ADASERVE_PROBE_TLS_CERT", "")
    certificate = (own, environment.get("ADASERVE_PROBE_TLS_KEY", own)) if own else None
    key = environment.get("ADASERVE_PROBE_KEY", "")
    try:
        status = probe(path, LOOPBACK.get(host, host), port, tls=tls, certificate=certificate, key=key)
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"{path} of port {port}: {error}")
    sys.exit(None if status == 200 else f"{path} of port {port} answered {status}")


if __name__ == "__main__":
    main()
