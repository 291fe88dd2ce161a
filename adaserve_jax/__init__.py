"""adaserve_jax: an LLM serving engine in which every request carries its own speed target.

    from adaserve_jax import LLM, SLO, SamplingParams
    with LLM(target="demo", draft="demo") as llm:
        (out,) = llm.generate("def add(a, b):", SamplingParams(max_tokens=32), slo=SLO(tpot_ms=40))
    print(out.text, out.metrics.slo_met)

`LLM` is the engine in this process; `EngineConfig`, `LearnConfig` and `DrafterConfig` say how it is built, `SLO` and
`SamplingParams` what a request wants. Every error is an `AdaServeError` (adaserve_jax.errors). docs/python-api.md says
more, and which modules beside this one are meant to be imported.
"""

from typing import TYPE_CHECKING, Any

from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import AdaServeError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.types import SLO, SamplingParams

if TYPE_CHECKING:
    from adaserve_jax.engine.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM", "SLO", "AdaServeError", "DrafterConfig", "EngineConfig", "LearnConfig", "SamplingParams",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load `LLM` on first use, so that tools which never run a model do not import jax."""
    if name == "LLM":
        from adaserve_jax.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
