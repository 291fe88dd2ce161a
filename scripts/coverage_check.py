"""Says which branches of the packages that run on the host no test takes, and fails under 95 % of any package's.

Reads what `coverage run` left (`make coverage`); `--missing` names lines and branches of each file. A file that no test
imports is in no data, and counts as one of whose branches none is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.95
"""Share of a package's branches that tests take."""


def measured(data: list[str]) -> dict[str, dict]:
    """Return what `coverage json` says of each file, those that nothing imported included. data: files that `coverage
    run` left; none: those that lie where pyproject.toml says."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(str(Coverage().get_option("run:data_file")))
        coverage = Coverage(data_file=str(Path(folder) / "data"))
        coverage.combine(data or [str(path) for path in where.parent.glob(f"{where.name}.*")], strict=True, keep=True)
        held = coverage.get_data()
        held.touch_files(absent(held.measured_files(), coverage.get_option("run:include")))
        coverage.json_report(outfile=str(Path(folder) / "report.json"))
        return json.loads((Path(folder) / "report.json").read_text())["files"]


def absent(seen: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Files of the package that the patterns name and `seen` lacks."""
    known = {Path(name).resolve() for name in seen}
    files = sorted((ROOT / "adaserve_jax").rglob("*.py"))
    return [str(f) for f in files if any(fnmatch(str(f), each) for each in patterns) and f not in known]


def by_package(files: dict[str, dict]) -> dict[str, tuple[int, int]]:
    """Count the branches of each package below the first, all and those taken."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, file in files.items():
        package, summary = name.split("/")[1], file["summary"]
        every, taken = found[package]
        found[package] = every + summary["num_branches"], taken + summary["covered_branches"]
    return dict(sorted(found.items()))


def missing(files: dict[str, dict]) -> list[str]:
    """Return a line for each file that tests do not take all of: lines, and branches as from->to, where to is below 0
    for the end of a function."""
    return [
        f"{name}: lines {lines}, branches {[f'{start}->{end}' for start, end in file['missing_branches']]}"
        for name, file in files.items()
        if (lines := file["missing_lines"]) or file["missing_branches"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="*", help="files that `coverage run` left")
    parser.add_argument("--missing", action="store_true", help="name what is not taken")
    arguments = parser.parse_args()
    files = measured(arguments.data)
    if arguments.missing:
        print("\n".join(missing(files)))
    few = False
    for package, (every, taken) in by_package(files).items():
        if not every:
            continue
        few |= taken < LEAST * every
        print(
            f"{package:10} {taken:5} of {every:5} branches, {taken / every:6.1%}{' TOO FEW' * (taken < LEAST * every)}"
        )
    sys.exit(few)


if __name__ == "__main__":
    main()
