"""The bench's own modules import without jax and without the server's packages."""

import subprocess
import sys

import pytest

BLOCKED = ("jax", "flax", "fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client", "transformers")
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


def test_bench_and_results_need_neither_jax_nor_the_servers_packages():
    imports = "\n".join(
        f"import adaserve_jax.{name}"
        for name in ("bench.runner", "bench.console", "workloads.workload", "results.aggregate", "results.jsonl")
    )
    done = run(BLOCKED, imports)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_local_engine_of_the_bench_needs_none_of_the_servers_packages():
    done = run(("fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client"), "import adaserve_jax.bench.local_client")
    assert done.returncode == 0, done.stderr
