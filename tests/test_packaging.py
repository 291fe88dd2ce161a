"""What the repository ships to run the server elsewhere: every option, key, path and time in it is one that exists."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from adaserve_jax.cli.app import app as cli
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.ipc import CLOSE_LIMIT_S, SAVE_LIMIT_S
from adaserve_jax.server import records
from adaserve_jax.server import tracing as traces
from adaserve_jax.server.app import create_app
from adaserve_jax.server.config_file import ConfigFile, read_config
from adaserve_jax.server.connection import ABORT_GRACE_S
from adaserve_jax.server.settings import ServerSettings
from tests.conftest import ROOT
from tests.server.routes import paths_of
from tests.server.scripted import ScriptedEngine

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "systemd" / "adaserve.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
MANIFESTS = {
    manifest["kind"]: manifest
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
AFTER_DRAIN_S = 2 * ABORT_GRACE_S + CLOSE_LIMIT_S + SAVE_LIMIT_S + records.CLOSE_TIMEOUT_S + traces.CLOSE_TIMEOUT_S
"""What is cut off is told, connections end, then the engine, the records, the traces: each as long as it may take."""
OWN_VARIABLES = {"ADASERVE_PROBE_KEY", "ADASERVE_PROBE_TLS_CERT", "ADASERVE_PROBE_TLS_KEY", "ADASERVE_CONFIG"}


def check_command(words: list[str]) -> None:
    """`adaserve COMMAND --option value ...` is one that this command line knows."""
    found = typer.main.get_command(cli)
    while hasattr(found, "commands"):  # a group
        found, words = found.commands[words[0]], words[1:]
    unknown = {word for word in words if word.startswith("--")} - {n for option in found.params for n in option.opts}
    assert not unknown, (found.name, unknown)


def paths() -> set[str]:
    return paths_of(create_app(ScriptedEngine(EngineConfig()), None, ServerSettings()).routes)


@pytest.fixture(scope="module")
def mounted(tmp_path_factory) -> ConfigFile:
    path = tmp_path_factory.mktemp("etc") / "adaserve.toml"
    path.write_text(MANIFESTS["ConfigMap"]["data"]["adaserve.toml"])
    return read_config(str(path))


def test_every_variable_is_a_setting():
    fields = {field.name for kind in (EngineConfig, ServerSettings) for field in dataclasses.fields(kind)}
    known = {f"ADASERVE_{name.upper()}" for name in fields} | OWN_VARIABLES
    for text in (DOCKERFILE, UNIT, (ROOT / "docs" / "deploy.md").read_text()):
        assert set(re.findall(r"\bADASERVE_[A-Z_]+", text)) <= known


def test_a_container_gets_the_time_that_the_document_says_to_end():
    (said,) = re.findall(r"--time (\d+)", (ROOT / "docs" / "deploy.md").read_text())
    assert float(said) > ServerSettings().shutdown_timeout + AFTER_DRAIN_S
    assert said == setting("TimeoutStopSec") == str(POD["terminationGracePeriodSeconds"])


def test_the_image_runs_the_server_as_a_user_of_its_own():
    stages = re.findall(r"(?m)^FROM \S+ AS (\w+)", DOCKERFILE)
    assert stages == ["build", "serve"]
    serve = DOCKERFILE.partition(" AS serve")[2]
    lines = dict(re.findall(r"(?m)^(\w+) +(.*)$", serve))
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", lines["USER"])
    assert yaml.safe_load(lines["ENTRYPOINT"]) == ["adaserve"]
    check_command(yaml.safe_load(lines["CMD"]))
    assert "--exit-when-dead" in lines["CMD"], "whoever runs the container sees that it ended, not what it says"
    check = yaml.safe_load(re.search(r"HEALTHCHECK.*?CMD (\[.*?\])", serve).group(1))
    assert check[:3] == ["python", "-m", "adaserve_jax.server.probe"] and check[3] in paths()
    assert lines["EXPOSE"] == str(ServerSettings().port)


def test_what_the_image_copies_and_installs_exists():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for sources in re.findall(r"(?m)^COPY (?!--from)(.*)$", DOCKERFILE):
        for source in sources.split()[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in ignored
    extras = set(re.search(r"ARG EXTRAS=(\S+)", DOCKERFILE).group(1).split(",")) | {"gpu"}
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras)
    assert re.search(r"ARG PYTHON=(\S+)", DOCKERFILE).group(1) in ("3.11", "3.12")


@pytest.mark.parametrize(("extras", "has_compiler"), [("server", True), ("server,gpu", False), ("gpu", False)])
def test_only_the_image_for_a_cpu_has_a_compiler(tmp_path: Path, extras: str, has_compiler: bool):
    """Run the image's own command in a shell, with an apt-get that only notes what it is asked for."""
    serve = DOCKERFILE.partition(" AS serve")[2]
    command = re.search(r"(?m)^ARG EXTRAS=server\nRUN (.*apt-get.*)$", serve).group(1)
    asked = tmp_path / "asked"
    noted = f'apt_get() {{ echo "$*" >> {asked}; }}; rm() {{ :; }}; {command.replace("apt-get", "apt_get")}'
    subprocess.run(["sh", "-euc", noted], env={"EXTRAS": extras}, check=True)
    assert asked.exists() == has_compiler
    if has_compiler:
        assert "install -y --no-install-recommends g++" in asked.read_text()


def setting(name: str) -> str:
    return re.search(rf"(?m)^{name}=(.*)$", UNIT).group(1)


def test_the_units_commands_exist_and_its_times_fit():
    for line in re.findall(r"(?m)^ExecStart(?:Pre)?=/opt/adaserve/bin/adaserve (.*)$", UNIT):
        check_command(line.split())
    assert float(setting("TimeoutStopSec")) > ServerSettings().shutdown_timeout + AFTER_DRAIN_S
    assert "--exit-when-dead" in setting("ExecStart") and setting("Restart") == "on-failure"
    assert setting("KillMode") == "mixed", "the engine's process must not get the signal that drains the server"
    assert setting("ExecReload") == "/bin/kill -HUP $MAINPID"


def test_the_drop_in_runs_a_cluster_of_the_units_server():
    text = (DEPLOY / "systemd" / "adaserve.service.d" / "cluster.conf").read_text()
    before, command = re.findall(r"(?m)^ExecStart=(.*)$", text)
    assert before == "", "a second ExecStart adds to the first, unless that is cleared"
    own, _, of_servers = command.removeprefix("/opt/adaserve/bin/adaserve ").partition(" -- ")
    check_command(own.split())
    assert of_servers and of_servers in setting("ExecStart")
    check_command(["serve", *of_servers.split()])
    assert re.search(r"(?m)^ExecReload=$", text), "a cluster ends on SIGHUP"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze to check the unit with")
def test_systemd_understands_the_unit(tmp_path: Path):
    unit = tmp_path / "adaserve.service"
    unit.write_text(UNIT.replace("/opt/adaserve/bin/adaserve", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "adaserve.service" not in done.stderr, done.stderr


def test_the_mounted_configuration_is_valid_and_its_secrets_are_in_the_secret(mounted: ConfigFile):
    secret = MANIFESTS["Secret"]
    assert CONTAINER["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]
    assert {key.key_env for key in mounted.server.keys} == set(secret["stringData"])
    assert set(secret["stringData"].values()) == {""}, "no key that works is in the repository"
    assert "ADASERVE_PROBE_KEY" in secret["stringData"]
    (volume,) = [v for v in POD["volumes"] if v["name"] == "config"]
    assert volume["configMap"]["name"] == MANIFESTS["ConfigMap"]["metadata"]["name"]
    folder = next(m["mountPath"] for m in CONTAINER["volumeMounts"] if m["name"] == "config")
    check_command(CONTAINER["args"])
    assert CONTAINER["args"][-2:] == ["--config", f"{folder}/adaserve.toml"]
    assert {m["name"] for m in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}


def test_the_probes_ask_routes_that_exist_at_the_port_that_is_open(mounted: ConfigFile):
    (port,) = CONTAINER["ports"]
    assert port["containerPort"] == mounted.server.port
    assert mounted.server.host == "0.0.0.0"
    assert CONTAINER["livenessProbe"]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert CONTAINER["startupProbe"]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert CONTAINER["readinessProbe"]["exec"]["command"] == ["python", "-m", "adaserve_jax.server.probe", "/ready"]
    assert {"/health", "/ready", "/metrics"} <= paths()
    service = MANIFESTS["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"] == MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels


def test_a_pod_has_time_to_drain_and_no_more_rights_than_it_needs(mounted: ConfigFile):
    pause_s = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > pause_s + mounted.server.shutdown_timeout + AFTER_DRAIN_S
    assert "--exit-when-dead" in CONTAINER["args"]
    assert POD["enableServiceLinks"] is False, "or the Service's variables would be read as options"
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert f"USER {POD['securityContext']['runAsUser']}:" in DOCKERFILE
    rights = CONTAINER["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
