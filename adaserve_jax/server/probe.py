"""Asks this machine's server how it is: `python -m adaserve_jax.server.probe /ready`; status 0 when it answers 200.

For health checks of containers. Needs nothing that is not in Python. The API key is taken from ADASERVE_PROBE_KEY: the
server may ask for one at `/ready`.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

TIMEOUT_S = 3.0


def probe(path: str, port: int, *, tls: bool = False, key: str = "") -> int:
    """The status of a GET to this machine's server. Raises OSError and HTTPException when nothing sensible answers.

    tls: speak https, without asking whose certificate it is: it is that of this machine's own port.
    """
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    finally:
        connection.close()


def main() -> None:
    """Exits with 0 for 200, 1 for everything else, which is said on stderr."""
    environment = os.environ
    path = sys.argv[1] if len(sys.argv) > 1 else "/health"
    port, tls = int(environment.get("ADASERVE_PORT", "8000")), bool(environment.get("ADASERVE_TLS_CERT"))
    try:
        status = probe(path, port, tls=tls, key=environment.get("ADASERVE_PROBE_KEY", ""))
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"{path} of port {port}: {error}")
    sys.exit(None if status == 200 else f"{path} of port {port} answered {status}")


if __name__ == "__main__":
    main()
