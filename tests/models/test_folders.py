"""Names of checkpoints to folders, without jax."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.config import resolve_folder


def test_names_resolve_to_folders(tmp_path: Path) -> None:
    assert resolve_folder(str(tmp_path), "target") == tmp_path
    with pytest.raises(CheckpointError, match=r"draft checkpoint '.*nowhere': expected a folder at .*, found nothing"):
        resolve_folder(tmp_path / "nowhere", "draft")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="found a file; give the path of a Hugging Face checkpoint folder"):
        resolve_folder(tmp_path / "file", "target")


def test_the_embedded_pair_has_a_name_and_finding_it_needs_no_jax() -> None:
    program = (
        "import sys; from adaserve_jax.models.config import resolve_folder\n"
        "print(resolve_folder('demo', 'target')); assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parts[-3:] == ("models", "demo", "target")
