"""What a cluster consists of: how many of which processes, by which commands, at which addresses.

Commands are templates, so that tests put stand-ins in their place, and so that they can be sent to other machines:
`{python}`, `{host}`, `{port}`, `{http_port}`, `{drafts}` (the services as --drafter takes them), `{drafter}` (a whole
--drafter option, left out without drafts).
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from adaserve_jax.cluster.keeper import Member, Patience
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.errors import ConfigError
from adaserve_jax.server.connection import ABORT_GRACE_S

TARGET_COMMAND = ("{python}", "-m", "adaserve_jax.cli", "serve", "--host", "{host}", "--port", "{port}", "{drafter}")
DRAFT_COMMAND = (
    "{python}", "-m", "adaserve_jax.cli", "draft", "--listen", "{host}:{port}", "--http", "{host}:{http_port}",
)  # fmt: skip
MOST_MEMBERS = 256
HOLDS = sys.platform == "linux"
OWN_OPTIONS = ("--host", "--port", "--drafter", "--listen", "--http")
"""Of members' commands, that the cluster gives itself."""


@dataclass(frozen=True)
class ClusterPlan:
    """targets, drafts: how many. member_host: where targets and drafts listen. serve_options, draft_options: passed on
    to their commands, whose templates are target_command and draft_command. Raises ConfigError."""

    targets: int
    drafts: int
    router: RouterSettings
    member_host: str = "127.0.0.1"
    serve_options: tuple[str, ...] = ()
    draft_options: tuple[str, ...] = ()
    target_command: tuple[str, ...] = TARGET_COMMAND
    draft_command: tuple[str, ...] = DRAFT_COMMAND
    patience: Patience = field(default_factory=Patience)

    @property
    def target_shutdown_s(self) -> float:
        """That a target gives requests in flight when it ends: by its own options, or as the router does."""
        given = [self.router.shutdown_timeout]
        for option, after in zip(self.serve_options, (*self.serve_options[1:], ""), strict=False):
            name, equals, value = option.partition("=")
            if name == "--shutdown-timeout":
                with contextlib.suppress(ValueError):  # the server says what is wrong with it
                    given.append(float(value if equals else after))
        return given[-1]

    @property
    def target_grace_s(self) -> float:
        """From a target's SIGTERM to its SIGKILL."""
        return self.target_shutdown_s + ABORT_GRACE_S + self.patience.margin

    @property
    def router_grace_s(self) -> float:
        """From the router's SIGTERM to its SIGKILL."""
        return self.router.shutdown_timeout + ABORT_GRACE_S + self.patience.margin

    def __post_init__(self) -> None:
        if not 1 <= self.targets <= MOST_MEMBERS:
            raise ConfigError(f"targets must be from 1 to {MOST_MEMBERS}, got {self.targets}")
        if not 0 <= self.drafts <= MOST_MEMBERS:
            raise ConfigError(f"drafts must be from 0 to {MOST_MEMBERS}, got {self.drafts}")

        if self.router.tls_client_ca is not None:
            raise ConfigError(
                "tls_client_ca cannot be given to a cluster, which asks its router how it is without a certificate; "
                "start 'adaserve cluster route' with it in front of the targets"
            )
        if self.router.tls_cert is not None:  # also read from elsewhere, by `adaserve cluster status`
            certificate = str(Path(self.router.tls_cert).absolute())
            object.__setattr__(self, "router", replace(self.router, tls_cert=certificate))
        for option in (*self.serve_options, *self.draft_options):
            if option.partition("=")[0] in OWN_OPTIONS:
                raise ConfigError(
                    f"{option.partition('=')[0]} is given to each server by the cluster itself; leave it out"
                )


class HeldPort:
    """A TCP port that nobody listens on. On Linux it is kept from others until `close`: there a server may listen on a
    port that a socket with SO_REUSEADDR is bound to, as servers' sockets are, and nobody is given it who asks for any.
    Elsewhere it is only free now. Raises OSError: somebody has it."""

    def __init__(self, host: str, number: int = 0):
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if number or HOLDS:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, number))
            self.number: int = self._socket.getsockname()[1]
        except OSError:
            self.close()
            raise
        if not HOLDS:
            self.close()

    def close(self) -> None:
        self._socket.close()


def free_ports(count: int, host: str) -> list[int]:
    """TCP ports that nobody listens on now."""
    held = [HeldPort(host) for _ in range(count)]
    for port in held:
        port.close()
    return [port.number for port in held]


def filled(template: Iterable[str], **values: str | int) -> tuple[str, ...]:
    """The command of a template. `{drafter}` is a whole option, or nothing."""
    drafts = str(values.get("drafts", ""))
    command: list[str] = []
    for part in template:
        if part == "{drafter}":
            command += ["--drafter", drafts] if drafts else []
            continue
        for name, value in {"python": sys.executable, **values}.items():
            part = part.replace("{" + name + "}", str(value))
        command.append(part)
    return tuple(command)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Placed:
    """A member with its addresses. url: of a target's API; address: as --drafter has a draft's."""

    member: Member
    kind: str
    url: str = ""
    address: str = ""


def target_environment(plan: ClusterPlan) -> dict[str, str]:
    """Targets ask for the router's API keys, speak plain HTTP to it whatever it speaks itself, and give requests as
    long to finish as it does, unless their own options say otherwise."""
    environment = {f"ADASERVE_{name}": "none" for name in ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")}
    environment["ADASERVE_SHUTDOWN_TIMEOUT"] = f"{plan.target_shutdown_s:g}"
    if plan.router.api_key is not None:
        environment["ADASERVE_API_KEY"] = plan.router.api_key
    return environment


def target_at(plan: ClusterPlan, number: int, host: str, port: int, drafts: Iterable[str], logs: Path) -> Placed:
    """Target `number`, counted from 0. drafts: addresses of the services that it may ask."""
    name, url = f"target-{number}", f"http://{bracketed(host)}:{port}"
    addresses = ",".join(drafts)
    assert bool(addresses) == bool(plan.drafts), "a target of a cluster with drafts is told of them"
    command = filled((*plan.target_command, *plan.serve_options), host=host, port=port, drafts=addresses)
    patience = replace(plan.patience, grace=plan.target_grace_s)
    member = Member(name, command, f"{url}/health", logs / f"{name}.log", target_environment(plan), patience=patience)
    return Placed(member, "target", url=url)


def draft_at(plan: ClusterPlan, number: int, host: str, port: int, http_port: int, logs: Path) -> Placed:
    """Draft service `number`, counted from 0."""
    name = f"draft-{number}"
    command = filled((*plan.draft_command, *plan.draft_options), host=bracketed(host), port=port, http_port=http_port)
    health = f"http://{bracketed(host)}:{http_port}/health"
    member = Member(name, command, health, logs / f"{name}.log", patience=plan.patience)
    return Placed(member, "draft", address=f"grpc://{bracketed(host)}:{port}")
