"""Plan of a cluster: which processes it has, the command of each, and the addresses where they listen."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from adaserve_jax.cluster.router import router_command
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.cluster.supervisor import Member, SupervisorTiming
from adaserve_jax.engine.ipc import CLOSE_LIMIT_S, SAVE_LIMIT_S
from adaserve_jax.errors import ConfigError
from adaserve_jax.server.config_file import NONE, read_config
from adaserve_jax.server.connection import ABORT_GRACE_S

TARGET_COMMAND = ("{python}", "-m", "adaserve_jax.cli", "serve", "--host", "{host}", "--port", "{port}", "{drafter}")
DRAFT_COMMAND = (
    "{python}", "-m", "adaserve_jax.cli", "draft", "--listen", "{host}:{port}", "--http", "{host}:{http_port}",
)  # fmt: skip
MAX_MEMBERS = 256
CAN_RESERVE_PORTS = sys.platform == "linux"
RESERVED_OPTIONS = ("--host", "--port", "--drafter", "--listen", "--http")
"""Options of members that only the cluster sets."""
TLS_SETTINGS = ("tls_cert", "tls_key", "tls_client_ca")
NO_TLS = {f"ADASERVE_{name.upper()}": NONE for name in TLS_SETTINGS}
"""Environment of members, whose own connections are plain whatever the router's environment says."""


@dataclass(frozen=True)
class ClusterPlan:
    """Number of servers and draft services, and how to start them. Raises ConfigError.

    member_host: address where targets and drafts listen. serve_options, draft_options: appended to the members'
    commands. target_command, draft_command: templates, filled by `render_command`; tests put stand-ins there.
    """

    targets: int
    drafts: int
    router: RouterSettings
    member_host: str = "127.0.0.1"
    serve_options: tuple[str, ...] = ()
    draft_options: tuple[str, ...] = ()
    target_command: tuple[str, ...] = TARGET_COMMAND
    draft_command: tuple[str, ...] = DRAFT_COMMAND
    timing: SupervisorTiming = field(default_factory=SupervisorTiming)

    def __post_init__(self) -> None:
        if not 1 <= self.targets <= MAX_MEMBERS:
            raise ConfigError(f"targets must be from 1 to {MAX_MEMBERS}, got {self.targets}")
        if not 0 <= self.drafts <= MAX_MEMBERS:
            raise ConfigError(f"drafts must be from 0 to {MAX_MEMBERS}, got {self.drafts}")
        if self.router.tls_client_ca is not None:
            raise ConfigError(
                "tls_client_ca cannot be given to a cluster, which asks its router how it is without a certificate; "
                "start 'adaserve cluster route' with it in front of the targets"
            )
        if self.router.tls_cert is not None:  # `adaserve cluster status` reads it from another working directory
            certificate = str(Path(self.router.tls_cert).absolute())
            object.__setattr__(self, "router", replace(self.router, tls_cert=certificate))
        for name in TLS_SETTINGS:
            if self._target_file.get(name) is not None:
                raise ConfigError(
                    f"the targets' configuration file sets {name}, but in a cluster only the router has TLS: leave it "
                    f"out of the file, and give --tls-cert and --tls-key to 'adaserve cluster up'"
                )
        for option in (*self.serve_options, *self.draft_options):
            if option.partition("=")[0] in RESERVED_OPTIONS:
                raise ConfigError(
                    f"{option.partition('=')[0]} is given to each server by the cluster itself; leave it out"
                )

    @property
    def target_shutdown_s(self) -> float:
        """Return the seconds that a target gives requests in flight when it stops.

        Its own option goes first, then its configuration file, then the router's setting.
        """
        otherwise = self.router.shutdown_timeout
        if "ADASERVE_SHUTDOWN_TIMEOUT" not in os.environ:  # which is the router's setting too
            otherwise = self._target_file.get("shutdown_timeout", otherwise)
        given = self._target_option("shutdown_timeout")
        with contextlib.suppress(ValueError):  # the server reports a wrong value
            return otherwise if given is None else float(given)
        return otherwise

    def _target_option(self, name: str) -> str | None:
        """Return the last value of an option of the targets; None without it."""
        option, found = f"--{name.replace('_', '-')}", None
        for given, after in zip(self.serve_options, (*self.serve_options[1:], ""), strict=False):
            start, equals, value = given.partition("=")
            if start == option:
                found = value if equals else after
        return found

    @cached_property
    def _target_file(self) -> Mapping[str, Any]:
        """Return the settings in the targets' configuration file. Raises ConfigError if it is wrong."""
        path = self._target_option("config") or os.environ.get("ADASERVE_CONFIG")
        return read_config(path).values if path and Path(path).exists() else {}  # a target may run elsewhere

    def learn_options(self, target: str) -> tuple[str, ...]:
        """Return the options that give one of several targets a learn_folder of its own, in the one that was given."""
        folder = self._learn_folder
        return () if self.targets == 1 or folder == NONE else ("--learn-folder", str(Path(folder, target)))

    @property
    def _learn_folder(self) -> str:
        folder = self._target_option("learn_folder") or os.environ.get("ADASERVE_LEARN_FOLDER")
        return folder or self._target_file.get("learn_folder") or NONE

    @property
    def target_grace_s(self) -> float:
        """Time from a target's SIGTERM to its SIGKILL, after which its engine has ended and saved what it learned."""
        engine_s = CLOSE_LIMIT_S + (0.0 if self._learn_folder == NONE else SAVE_LIMIT_S)
        return self.target_shutdown_s + ABORT_GRACE_S + engine_s + self.timing.grace_margin_s

    @property
    def router_grace_s(self) -> float:
        """Time from the router's SIGTERM to its SIGKILL."""
        return self.router.shutdown_timeout + ABORT_GRACE_S + self.timing.grace_margin_s


class ReservedPort:
    """A free TCP port, kept from other programs until `close`. Raises OSError if it is taken.

    On Linux a bound socket that does not listen holds the port: the kernel gives it to nobody who asks for any free
    port, but a server may still bind it with SO_REUSEADDR and listen. Elsewhere the port is only free at this moment.
    """

    def __init__(self, host: str, number: int = 0):
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if number or CAN_RESERVE_PORTS:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, number))
            self.number: int = self._socket.getsockname()[1]
        except OSError:
            self.close()
            raise
        if not CAN_RESERVE_PORTS:
            self.close()

    def close(self) -> None:
        self._socket.close()


def free_ports(count: int, host: str) -> list[int]:
    """Return different TCP ports on which nobody listens now."""
    reserved = [ReservedPort(host) for _ in range(count)]
    for port in reserved:
        port.close()
    return [port.number for port in reserved]


def render_command(template: Iterable[str], **values: str | int) -> tuple[str, ...]:
    """Fill the placeholders of a command template.

    `{python}`, `{host}`, `{port}` and `{http_port}` are replaced inside an argument. The argument `{drafter}` becomes
    the option `--drafter` with the value of `drafts`, or nothing if there are no drafts.
    """
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
    """Return the host as a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def target_environment(plan: ClusterPlan) -> dict[str, str]:
    """Return environment variables of a target, which its own options override.

    A target checks the router's API keys, uses plain HTTP whatever the router uses, and gives requests
    `plan.target_shutdown_s` to finish.
    """
    environment = dict(NO_TLS)
    environment["ADASERVE_SHUTDOWN_TIMEOUT"] = f"{plan.target_shutdown_s:g}"
    if plan.router.api_key is not None:
        environment["ADASERVE_API_KEY"] = plan.router.api_key
    return environment


def place_target(plan: ClusterPlan, number: int, host: str, port: int, drafts: Iterable[str], logs: Path) -> Member:
    """Return target `number` (from 0). drafts: addresses of the draft services that it may use."""
    name, url = f"target-{number}", f"http://{bracketed(host)}:{port}"
    addresses = ",".join(drafts)
    assert bool(addresses) == bool(plan.drafts), "a target of a cluster with drafts gets their addresses"
    command = render_command(
        (*plan.target_command, *plan.serve_options, *plan.learn_options(name)), host=host, port=port, drafts=addresses
    )
    timing = replace(plan.timing, termination_grace_s=plan.target_grace_s)
    return Member(
        name, command, f"{url}/health", logs / f"{name}.log", "target", url, target_environment(plan), timing=timing
    )


def place_draft(plan: ClusterPlan, number: int, host: str, port: int, http_port: int, logs: Path) -> Member:
    """Return draft service `number` (from 0)."""
    name = f"draft-{number}"
    template = (*plan.draft_command, *plan.draft_options)
    command = render_command(template, host=bracketed(host), port=port, http_port=http_port)
    health = f"http://{bracketed(host)}:{http_port}/health"
    address = f"grpc://{bracketed(host)}:{port}"
    return Member(name, command, health, logs / f"{name}.log", "draft", address, NO_TLS, timing=plan.timing)


def place_router(plan: ClusterPlan, settings: RouterSettings, descriptor: int, url: str, logs: Path) -> Member:
    """Return the router of a plan. descriptor: its bound socket. Without a usable target it counts as ready too."""
    command, environment = router_command(settings, descriptor)
    return Member(
        "router", command, f"{url}/health", logs / "router.log", "router", url, environment, (descriptor,),
        ("ok", "starting", "no_target"), replace(plan.timing, termination_grace_s=plan.router_grace_s),
    )  # fmt: skip
