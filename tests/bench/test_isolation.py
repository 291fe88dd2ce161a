"""The bench's local engine imports without the server's packages."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"blocked {{name}}", name=name)
sys.meta_path.insert(0, Block())
{imports}
"""


def run(blocked: tuple[str, ...], imports: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(blocked=blocked, imports=imports)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_local_engine_of_the_bench_needs_none_of_the_servers_packages():
    done = run(("fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client"), "import adaserve_jax.bench.local_client")
    assert done.returncode == 0, done.stderr
