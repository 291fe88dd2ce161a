"""`adaserve cluster`: runs servers and draft services as one. Optional packages are imported when it starts."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.cli.options import Command, Group, takes
from adaserve_jax.cli.terminal import SERVER_PACKAGES, needs
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.errors import ERROR_PREFIX, AdaServeError, ConfigError

PACKAGES = SERVER_PACKAGES | {"h11": "server", "ray": "cluster"}
LOOK_EVERY_S = 0.2
ORCHESTRATORS = ("local", "ray")
PLACEMENT = "SPREAD"

cluster = typer.Typer(
    name="cluster", help="Serve with several targets and draft services behind one router.", add_completion=False,
    no_args_is_help=True, rich_markup_mode=None, cls=Group,
)  # fmt: skip

Folder = Annotated[
    str | None,
    typer.Option(
        "--run-folder", envvar="ADASERVE_RUN_FOLDER", show_envvar=False,
        help="folder of the cluster's state, token and logs; left out: one of this user's",
    ),
]  # fmt: skip


def _folder(path: str | None) -> Any:
    from adaserve_jax.cluster.run_folder import ClusterFolder, default_folder

    return ClusterFolder(default_folder() if path is None else Path(path).absolute())


@cluster.command("up", cls=Command)
@takes("router", RouterSettings, without=("targets", "token_file"))
def up(
    router: RouterSettings,
    targets: Annotated[int, typer.Option(help="servers to start")] = 1,
    drafts: Annotated[int, typer.Option(help="draft services to start; 0: none, each server drafts for itself")] = 0,
    orchestrator: Annotated[
        str, typer.Option(help="local: processes of this machine; ray: actors of a Ray cluster")
    ] = "local",
    draft_options: Annotated[
        str, typer.Option(help="options of `adaserve draft`, as one text, as '--max-sessions 64'")
    ] = "",
    detach: Annotated[bool, typer.Option("--detach", help="go on in the background once requests are served")] = False,
    run_folder: Folder = None,
    address: Annotated[
        str | None, typer.Option(help="of a running Ray cluster, or auto; left out: one is started for this cluster")
    ] = None,
    placement: Annotated[
        str,
        typer.Option(help="how Ray places targets and drafts: SPREAD over machines, PACK, STRICT_SPREAD, STRICT_PACK"),
    ] = PLACEMENT,
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(help="options of `adaserve serve` for every target, after --", show_default=False),
    ] = None,
) -> None:
    """Start a cluster and keep it running until SIGTERM, Ctrl-C, or `adaserve cluster down`."""
    with needs("a cluster", PACKAGES):
        from adaserve_jax.cluster.plan import ClusterPlan

        try:
            of_drafts = tuple(shlex.split(draft_options))
        except ValueError as error:
            raise ConfigError(
                f"--draft-options must be options as a shell reads them, got {draft_options!r}: {error}"
            ) from None
        plan = ClusterPlan(targets, drafts, router, serve_options=tuple(serve_options or ()), draft_options=of_drafts)
        if orchestrator not in ORCHESTRATORS:
            raise ConfigError(f"orchestrator must be one of {', '.join(ORCHESTRATORS)}, got {orchestrator!r}")
        if orchestrator != "ray" and (address is not None or placement != PLACEMENT):
            raise ConfigError("--address and --placement are of a Ray cluster; give --orchestrator ray too")
        if draft_options and not drafts:
            raise ConfigError("--draft-options are of draft services, and --drafts starts none; give it too")
        folder = _folder(run_folder)
        if detach:
            _detach(folder)
        elif orchestrator == "ray":
            from adaserve_jax.cluster.ray_cluster import run_up_on_ray

            run_up_on_ray(plan, folder, address, placement)
        else:
            from adaserve_jax.cluster.local import run_up

            run_up(plan, folder)


def _detach(folder: Any) -> None:
    """Start the same command in a session of its own; return once it serves, and print its log until then.

    Raises AdaServeError with its error when it ends before.
    """
    command = [sys.executable, "-m", "adaserve_jax.cli", *(each for each in sys.argv[1:] if each != "--detach")]
    folder.make()
    log = folder.logs / "cluster.log"
    with log.open("ab") as output, log.open("rb") as shown:
        shown.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        why, text = "", ""
        try:
            while True:
                has_ended, url = child.poll() is not None, _url_once_ready(folder, child.pid)
                text += shown.read().decode(errors="replace")
                *lines, text = text.split("\n")  # its last line may be half written
                for line in [*lines, text] if has_ended else lines:
                    if line.startswith(ERROR_PREFIX):
                        why = line.removeprefix(ERROR_PREFIX)
                    elif line:
                        typer.echo(line)
                if has_ended:
                    ended = f"the cluster ended with status {child.returncode}; its log is {log}"
                    raise AdaServeError(f"{why} ({ended})" if why else ended)
                if url is not None:
                    typer.echo(f"the cluster serves on {url} in the background; its log is {log}")
                    return
                time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:
            child.terminate()  # it is in a session of its own
            raise


def _url_once_ready(folder: Any, pid: int) -> str | None:
    try:
        state = folder.read()
    except ConfigError:
        return None
    return state["url"] if state["pid"] == pid and state["phase"] == "ready" else None


@cluster.command("route", cls=Command)
@takes("router", RouterSettings)
def route(router: RouterSettings) -> None:
    """Route requests to servers that somebody else starts, until SIGTERM or Ctrl-C."""
    if not router.targets and router.token_file is None:
        raise ConfigError(
            "--targets must name a server at least, or --token-file the token by which they are given later"
        )
    with needs("a cluster", PACKAGES):
        from adaserve_jax.cluster.router import run_router
    asyncio.run(run_router(router))


@cluster.command("status", cls=Command)
def status(run_folder: Folder = None) -> None:
    """Say what a cluster consists of, and how its processes are."""
    from adaserve_jax.cluster.router_client import NoAnswer, request_json

    folder = _folder(run_folder)
    state = folder.read()
    typer.echo(f"{state['url'] or 'no address yet'}  {state['phase']}, {state['orchestrator']}, pid {state['pid']}")
    routed: dict[str, Any] = {}
    if state["url"]:
        try:
            _, routed = request_json(f"{state['url']}/cluster", token=folder.token, certificate=state["tls_cert"])
        except NoAnswer as error:
            typer.echo(str(error))
    by_url = {each["url"]: each for each in routed.get("targets", [])}
    for member in state["members"]:
        seen = by_url.get(member["address"])
        use = ""
        if seen is not None:
            engine = f" and {seen['engine_restarts']} of its engine" if seen["engine_restarts"] else ""
            use = f"{engine}, {seen['state']} at the router, {seen['in_flight']} in flight"
        detail = f" ({member['detail']})" if member["detail"] else ""
        typer.echo(
            f"  {member['name']:10} {member['phase']}{detail}, pid {member['pid']}, {member['address']}, "
            f"{member['restarts']} {'restart' if member['restarts'] == 1 else 'restarts'}{use}"
        )


@cluster.command("restart", cls=Command)
def restart(
    what: Annotated[str, typer.Argument(help="what to replace: targets, drafts or all")] = "targets",
    run_folder: Folder = None,
) -> None:
    """Replace every target, one after another, without losing a request; or drafts, without which targets decode."""
    from adaserve_jax.cluster.run_folder import RESTART_SCOPES, give_order

    if what not in RESTART_SCOPES:
        raise ConfigError(f"what is replaced must be one of {', '.join(RESTART_SCOPES)}, got {what!r}")
    for line in give_order(_folder(run_folder).socket, f"restart {what}"):
        typer.echo(line)


@cluster.command("down", cls=Command)
def down(
    run_folder: Folder = None,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster, or auto: end what `up` left there, where it is gone itself")
    ] = None,
) -> None:
    """Stop a cluster: requests in flight finish, then all its processes end."""
    from adaserve_jax.cluster.run_folder import give_order

    if address is not None:
        with needs("a cluster", PACKAGES):
            from adaserve_jax.cluster.ray_cluster import down_on_ray
        typer.echo(f"{down_on_ray(address)} actors were ended")
        return

    folder = _folder(run_folder)
    list(give_order(folder.socket, "down"))
    typer.echo("the cluster stops; requests in flight finish first", err=True)
    while folder.is_held:
        time.sleep(LOOK_EVERY_S)
    typer.echo("the cluster has ended")
