"""What the repository promises about itself: documented options, import direction, a README that runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import adaserve_jax
from scripts import checks_table, policies_table, readme_table, results_table
from tests.conftest import LONGEST, OPTIMISED, ROOT

TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".jsonl", ".txt", ".cfg", ".jinja", ".html", ""}
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    ".venv-clients",
    ".cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    "__pycache__",
    "build",
}
SERVER_PACKAGES = ("fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client", "llguidance")

PACKAGE = ROOT / "adaserve_jax"
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def repository_files() -> list[Path]:
    """Tracked files; without git, every file outside folders of caches."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return [p for p in ROOT.rglob("*") if p.is_file() and not SKIPPED_FOLDERS & set(p.relative_to(ROOT).parts)]
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_files_that_are_run_first_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_what_is_compiled_as_users_run_it_is_there():
    assert [name for name in OPTIMISED if not (ROOT / "tests" / name).exists()] == []
    assert "--no-loadscope-reorder" in MAKEFILE  # else xdist puts files of few tests last


def test_version_is_the_same_everywhere():
    assert PYPROJECT["project"]["version"] == adaserve_jax.__version__
    assert f"[{adaserve_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_justified():
    project = PYPROJECT["project"]
    extras = [*project["optional-dependencies"].values(), *PYPROJECT["dependency-groups"].values()]
    listed = project["dependencies"] + [item for extra in extras for item in extra]
    names = {re.match(r"[A-Za-z0-9_-]+", item).group() for item in listed}
    text = (ROOT / "docs" / "dependencies.md").read_text()
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_no_file_names_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|Users|mnt)/[A-Za-z]")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in repository_files()
        if path.suffix in TEXT_SUFFIXES and path != Path(__file__)
        if pattern.search(text := path.read_text(errors="replace"))
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) < 10_000 and pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/README.md"])
def test_make_targets_that_the_documents_name_exist(name: str):
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE))
    assert named <= targets
    assert {"serve", "test"} <= targets


def test_readme_shows_the_two_commands():
    assert "make serve " in README and "make test " in README


def test_links_between_documents_lead_somewhere():
    documents = [path for path in repository_files() if path.suffix == ".md"]
    broken = [
        f"{path.relative_to(ROOT)} -> {target}"
        for path in documents
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert broken == []


def test_symbols_are_named_where_the_equations_say():
    lines = (ROOT / "docs" / "equations.md").read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    named = [(name, re.findall(r"`(\S+\.py)`", row[3])) for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert len(named) > 30
    assert [(name, *files) for name, files in named if len(files) != 1] == []
    paths = [(name, (ROOT if file.startswith("benchmarks/") else PACKAGE) / file) for name, (file,) in named]
    assert [(name, path) for name, path in paths if name not in path.read_text()] == []


def test_documents_that_the_code_names_exist():
    code = [path for path in repository_files() if path.suffix == ".py" and path != Path(__file__)]
    named = {name for path in code for name in re.findall(r"docs/[\w./-]*\.md", path.read_text())}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_files_of_the_life_of_a_request_exist():
    page = (ROOT / "docs" / "architecture" / "life-of-a-request.md").read_text()
    named_file = r"`([a-z_]+/[\w/]+\.py|types\.py)`"
    named = set(re.findall(named_file, page))
    assert len(named) > 20 and sorted(name for name in named if not (PACKAGE / name).is_file()) == []
    core = re.findall(named_file, page.partition("## The core path")[2])
    assert len(page.splitlines()) <= 60
    assert len(core) > 10 and sum(len((PACKAGE / name).read_text().splitlines()) for name in core) <= 5000


def test_every_document_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    documents = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"]
    assert [path.name for path in documents if f"({path.relative_to(ROOT / 'docs').as_posix()})" not in index] == []


def test_files_that_make_names_exist():
    named = re.findall(r"\$\(BIN\)/python ([\w./]+\.py)", MAKEFILE)
    assert [name for name in named if not (ROOT / name).exists()] == []


IN_TURN = """
import contextlib, importlib, json, runpy, sys
loaded, status = {}, []

def note(name):
    loaded[name] = sorted({each.partition(".")[0] for each in sys.modules})

def command(*words):
    sys.argv = ["adaserve", *words]
    try:
        runpy.run_module("adaserve_jax", run_name="__main__")
    except SystemExit as ended:
        status.append(ended.code)

import adaserve_jax
note("package")
for name in ("scheduler.scheduler", "sim.executor", "bench.runner", "bench.console", "workloads.workload",
             "results.aggregate", "results.jsonl", "engine.client"):
    importlib.import_module(f"adaserve_jax.{name}")
note("scheduler and bench")
command("--help")
note("help")
command("serve", "--policy", "adaserv", "--port", "0")
note("unknown policy")
sys.modules["opentelemetry.sdk"] = sys.modules["opentelemetry.exporter"] = None
import adaserve_jax.server.serve
note("front end")
import adaserve_jax.engine.remote_draft
note("remote drafts")
print(json.dumps([loaded, status]))
"""


def test_nothing_heavy_is_imported_before_it_is_needed():
    """Import one module after another: what each imports alone is among what is there then. The API of OpenTelemetry
    comes with other packages, its SDK and exporter with the extra `otel` alone. Remote drafts may import jax."""
    done = subprocess.run([sys.executable, "-c", IN_TURN], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *help_lines, last = done.stdout.splitlines()
    loaded, status = json.loads(last)
    assert {"serve", "bench"} <= {word for line in help_lines for word in line.split()}
    assert status == [0, 2]
    assert done.stderr.startswith("adaserve: error: unknown policy 'adaserv'; did you mean 'adaserve'?")
    assert len(done.stderr.splitlines()) == 1
    assert "grpc" not in loaded.pop("remote drafts")
    heavy = {"jax", "jaxlib", "flax", "grpc"}
    front = set(loaded.pop("front end"))
    assert "fastapi" in front and not heavy & front
    heavy |= {"torch", "transformers", *SERVER_PACKAGES}
    assert {name: found for name, modules in loaded.items() if (found := heavy & set(modules))} == {}


def test_imports_go_downward():
    tool = Path(sys.executable).parent / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed; `make test` installs it")
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", [checks_table, policies_table, readme_table])
def test_tables_are_what_their_scripts_write(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert page == script.updated(page), f"run: python -m {script.__name__}"


def test_documents_show_the_committed_results() -> None:
    stale = [path.name for path, text in results_table.updated().items() if path.read_text() != text]
    assert not stale, "run: python -m scripts.results_table"
