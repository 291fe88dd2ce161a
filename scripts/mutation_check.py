"""Breaks the package on purpose, one named way at a time, and expects the tests that are named to fail.

What is broken, where, and who must notice is in scripts/mutations.toml. Each mutation is applied to a copy in a
temporary folder. Fails if a mutation survives, if its text is not found exactly once, or if the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "adaserve_jax"
LIST = Path(__file__).with_name("mutations.toml")
COPIED = (PACKAGE, "tests", "benchmarks", "pyproject.toml")
TESTS_FAILED = 1
"""pytest's exit status; others say that it could not run them."""


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in `file`, a path within the package. part: what it belongs to. tests: files, or tests, of
    which one must fail."""

    part: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the file's text with the mutation. Raises ValueError: `old` is not there exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"{self.file}: the text of {self.name!r} must be there exactly once, found {found} times; "
                f"write it in {LIST.name} as the code has it now"
            )
        return text.replace(self.old, self.new)


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """Tests of a mutation are those of its part, unless it names its own. Raises TypeError: a key that is not known,
    or one that is missing."""
    return [
        Mutation(part, **{"tests": tuple(of_part["tests"]), **mutation})
        for part, of_part in tomllib.loads(path.read_text()).items()
        for mutation in of_part["mutation"]
    ]


class Copy:
    """The package and its tests in a folder of their own, where files can be broken."""

    def __init__(self, folder: Path):
        self._folder = folder
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)

    def test(self, tests: tuple[str, ...]) -> tuple[int, str]:
        """pytest's exit status and the first failure, or the last line."""
        plugins = ["-p", "scripts.no_shrinking", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *plugins, "-q", "-x", "--tb=no", "-rf", *tests]
        paths = os.pathsep.join((str(self._folder), str(LIST.parent.parent)))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        done = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if line.strip()]
        failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith("FAILED ")]
        return done.returncode, (failed or lines[-1:] or [""])[0]

    def check(self, mutation: Mutation) -> tuple[int, str]:
        """Run `test` with the mutation, and take it back."""
        path = self._folder / PACKAGE / mutation.file
        before = path.read_text()
        path.write_text(mutation.applied(before))
        try:
            return self.test(mutation.tests)
        finally:
            path.write_text(before)


def check_all(mutations: list[Mutation], folders: list[Path]) -> int:
    """Print a line for each mutation; how many were not caught. Raises ValueError: the text of one is not there."""
    for mutation in mutations:
        mutation.applied((ROOT / PACKAGE / mutation.file).read_text())
    copies = [Copy(folder) for folder in folders]
    tests = tuple(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    status, told = copies[0].test(tests)
    if status:
        print(f"the tests must pass before anything is broken, but: {told}", file=sys.stderr)
        return len(mutations)
    survived = 0

    def check(mutation: Mutation) -> tuple[Mutation, int, str, float]:
        copy, began = copies.pop(), time.monotonic()
        status, told = copy.check(mutation)
        copies.append(copy)
        return mutation, status, told, time.monotonic() - began

    with ThreadPoolExecutor(len(folders)) as pool:
        for mutation, status, told, seconds in pool.map(check, mutations):
            word = {TESTS_FAILED: "caught", 0: "SURVIVED"}.get(status, "NOT RUN")
            survived += status != TESTS_FAILED
            print(f"{word:8}  {seconds:5.1f} s  {mutation.part}: {mutation.name}  [{told}]", flush=True)
    return survived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts of mutations.toml, or names of mutations; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at once")
    arguments = parser.parse_args()
    mutations = read_mutations()
    known = {name for mutation in mutations for name in (mutation.part, mutation.name)}
    if unknown := sorted(set(arguments.parts) - known):
        parser.error(f"no part or mutation is called {', '.join(map(repr, unknown))}; see scripts/{LIST.name}")
    wanted = [each for each in mutations if not arguments.parts or {each.part, each.name} & set(arguments.parts)]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        folders = [Path(folder) / str(number) for number in range(max(1, min(arguments.jobs, len(wanted))))]
        for each in folders:
            each.mkdir()
        survived = check_all(wanted, folders)
    print(f"{len(wanted) - survived} of {len(wanted)} caught")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
