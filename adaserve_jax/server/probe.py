"""Health check for containers: `python -m adaserve_jax.server.probe /ready` exits with 0 when the server answers 200.

It needs only the standard library. The API key, which `/ready` may ask for, comes from ADASERVE_PROBE_KEY.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

TIMEOUT_S = 3.0


def probe(path: str, port: int, *, tls: bool = False, key: str = "") -> int:
    """Return the status of a GET to this machine's server. Raises OSError and HTTPException when none answers.

    tls: use https; the certificate is not checked, since the port is this machine's own.
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
    """Exit with 0 for a 200, else with 1 and a message on stderr."""
    environment = os.environ
    path = sys.argv[1] if len(sys.argv) > 1 else "/health"
    port = int(environment.get("ADASERVE_PORT", "8000"))
    tls = environment.get("ADASERVE_TLS_CERT", "none") not in ("", "none")
    try:
        status = probe(path, port, tls=tls, key=environment.get("ADASERVE_PROBE_KEY", ""))
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"{path} of port {port}: {error}")
    sys.exit(None if status == 200 else f"{path} of port {port} answered {status}")


if __name__ == "__main__":
    main()
