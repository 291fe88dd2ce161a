"""The command that starts a router in a process of its own: `python -m adaserve_jax.cluster.router_command`.

Its settings come as JSON in its environment, where other users do not see an API key; a socket may be inherited.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict

from adaserve_jax.cluster.router import run_router
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.errors import AdaServeError

SETTINGS = "ADASERVE_ROUTER_SETTINGS"


def router_command(settings: RouterSettings, descriptor: int | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Command and environment. descriptor: of a bound socket that the process inherits; None: it binds its own port."""
    own = () if descriptor is None else (str(descriptor),)
    return (sys.executable, "-m", __name__, *own), {SETTINGS: json.dumps(asdict(settings))}


def main() -> None:
    values = json.loads(os.environ.pop(SETTINGS))
    values["targets"] = tuple(values["targets"])
    listener = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else None
    try:
        sys.exit(run_router(RouterSettings(**values), listener))
    except AdaServeError as error:
        print(f"adaserve: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
