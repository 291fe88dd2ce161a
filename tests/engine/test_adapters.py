"""Adapters in a running engine: each text is that of the merged checkpoint, whatever drafts, is cached, or runs beside
it; and adapters come and go while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.models.config import resolve_folder
from tests.conftest import compiling
from tests.engines import DEMO, EXACT, PLAIN
from tests.models.adapters import write_adapter, write_merged

TOKENS = 128
ROOM = {"max_context": 256, "num_pages": 128}
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
PROMPT = "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
PROMPTS = [PROMPT, "Question: Tom has 3 apples and Sara has 5 more than Tom. How many do they have?\nAnswer:"]
SETTINGS = {"code": (1, 4, 1.0), "sums": (2, 8, 2.0), "third": (3, 2, 1.0)}
"""Seed, rank and alpha of each adapter. They are weak enough that the draft is right at times."""
POLICIES = ("ar", "spec:4", "adaserve")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the adapters of the embedded target, by name."""
    place, base = tmp_path_factory.mktemp("adapters"), resolve_folder("demo", "target")
    return {
        name: write_adapter(place / name, base, seed=seed, rank=rank, alpha=alpha)
        for name, (seed, rank, alpha) in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def merged(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Texts of engines whose checkpoints have the adapters merged into the weights, by adapter; "": of none."""
    place, base = tmp_path_factory.mktemp("merged"), resolve_folder("demo", "target")
    targets = {"": base} | {name: write_merged(place / name, base, folder) for name, folder in folders.items()}
    texts = {}
    for name, target in targets.items():
        with LLM(str(target), **(PLAIN | ROOM)) as llm:
            texts[name] = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert len({str(each) for each in texts.values()}) == len(texts), "every adapter changes the texts"
    return texts


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    """An engine in deterministic mode with two adapters and no room for a third."""
    with compiling("adapters"):
        made = LLM(
            lora=tuple(f"{name}={folders[name]}" for name in ("code", "sums")), max_lora_rank=8, **(EXACT | ROOM)
        )
    with made as llm:
        yield llm
        assert llm.stats().compiles_after_ready == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_texts_are_those_of_merged_checkpoints(llm: LLM, merged: dict[str, list[list[int]]], policy: str) -> None:
    """Two adapters and the model alone in one batch, first with an empty prefix cache, then with hits."""
    llm.set_policy(policy)
    adapters = [name for name in ("code", "", "sums") for _ in PROMPTS]
    before = llm.stats().scheduler.accepted_tokens
    for hits in (False, True):
        outputs = llm.generate(PROMPTS * 3, GREEDY, slo=SLO(tpot_ms=0.5), adapter=adapters)
        assert [output.token_ids for output in outputs] == merged["code"] + merged[""] + merged["sums"]
        assert all((output.metrics.cached_tokens > 0) == hits for output in outputs)
    assert (llm.stats().scheduler.accepted_tokens > before) == (policy != "ar")


@pytest.mark.slow
def test_bits_do_not_depend_on_what_runs_beside_them(llm: LLM) -> None:
    """In deterministic mode, log probabilities are equal to the last bit, alone and among other adapters."""
    llm.set_policy("adaserve")
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, logprobs=3)
    names = ["code", "", "sums", "code", "sums", ""]
    prompts = [PROMPT[: 10 + 9 * i] for i in range(len(names))]
    salts = [str(i) for i in range(len(names))]
    together = llm.generate(prompts, params, adapter=names, cache_salt=salts, slo=SLO(tpot_ms=0.5))
    for prompt, name, output in zip(prompts, names, together, strict=True):
        (alone,) = llm.generate(prompt, params, adapter=name, cache_salt="alone", slo=SLO(tpot_ms=0.5))
        assert output.choices[0].token_ids == alone.choices[0].token_ids
        assert output.choices[0].logprobs == alone.choices[0].logprobs


@pytest.mark.slow
def test_cached_pages_are_those_of_the_same_adapter(llm: LLM) -> None:
    llm.set_policy("adaserve")  # the cache begins empty
    params = replace(GREEDY, max_tokens=2)

    def cached(adapter: str) -> int:
        return llm.generate(PROMPT, params, adapter=adapter)[0].metrics.cached_tokens

    assert [cached(name) for name in ("code", "sums", "")] == [0, 0, 0]
    assert min(cached(name) for name in ("code", "sums", "")) > 0


@pytest.mark.slow
def test_texts_to_draft_from_are_those_of_the_same_adapter(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=40)

    def after(*adapters: str) -> tuple[list[int], int]:
        """Text of the model alone, and its steps, after others have written theirs."""
        llm.set_policy("adaserve@suffix")  # a scheduler that has seen nothing
        for adapter in adapters:
            llm.generate(PROMPT, params, adapter=adapter)
        (output,) = llm.generate(PROMPT, params)
        return output.token_ids, output.metrics.verify_steps

    alone, own, others = after(), after(""), after("code", "sums")
    assert own[1] < alone[1], "its own text helps"
    assert own[0] == alone[0] == others[0]
    assert others[1] > own[1]
    llm.set_policy("adaserve")


@pytest.mark.slow
def test_adapters_come_and_go(llm: LLM, folders: dict[str, Path], merged: dict[str, list[list[int]]]) -> None:
    """A name that is loaded again is another adapter: neither its pages nor its texts are the old one's."""
    llm.set_policy("adaserve")

    def check(name: str, expected: str) -> int:
        outputs = llm.generate(PROMPTS, GREEDY, adapter=name)
        assert [output.token_ids for output in outputs] == merged[expected]
        return min(output.metrics.cached_tokens for output in outputs)

    check("code", "code")
    assert check("code", "code") > 0
    llm.load_adapter("code", str(folders["third"]), replace=True)
    assert llm.info.adapters == ("code", "sums")
    assert check("code", "third") == 0
    llm.unload_adapter("code")
    with pytest.raises(RequestError, match="adapter 'code' must be one that is loaded: sums") as caught:
        llm.generate(PROMPT, GREEDY, adapter="code")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    llm.load_adapter("code", str(folders["code"]))
    assert llm.info.adapters == ("sums", "code")
    assert check("code", "code") == 0
    assert check("", "") >= 0 and check("sums", "sums") >= 0


@pytest.mark.slow
def test_a_request_ends_with_the_adapter_that_it_began_with(
    llm: LLM, folders: dict[str, Path], merged: dict[str, list[list[int]]]
) -> None:
    chunks = llm.stream(PROMPT, GREEDY, adapter="sums")
    tokens = list(next(chunks).token_ids)
    llm.unload_adapter("sums")
    with pytest.raises(RequestError, match="all 2 adapters that have room are loaded, or still in use") as caught:
        llm.load_adapter("third", str(folders["third"]))
    assert caught.value.code == "no_adapter_slot"
    for chunk in chunks:
        tokens += chunk.token_ids
    assert tokens == merged["sums"][0]
    llm.load_adapter("third", str(folders["third"]))
    assert llm.generate(PROMPT, GREEDY, adapter="third")[0].token_ids == merged["third"][0]
    llm.unload_adapter("third")
    llm.load_adapter("sums", str(folders["sums"]))


@pytest.mark.slow
def test_an_adapter_that_the_device_has_no_room_for_costs_nothing_else(
    llm: LLM, folders: dict[str, Path], merged: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("adaserve_jax.runtime.adapters.jax.device_put", full)
        with pytest.raises(RequestError, match="the device has no room for the adapter: RESOURCE_EXHAUSTED"):
            llm.load_adapter("code", str(folders["third"]), replace=True)
    assert set(llm.info.adapters) == {"code", "sums"}
    assert llm.generate(PROMPT, GREEDY, adapter="code")[0].token_ids == merged["code"][0]


def test_engines_without_room_say_so(demo_engine, folders: dict[str, Path]) -> None:
    llm = LLM.over(demo_engine)
    with pytest.raises(RequestError, match="no room for adapters; start it with max_loras, or with lora NAME=FOLDER"):
        llm.load_adapter("code", str(folders["code"]))
    with pytest.raises(RequestError, match="adapter 'code' must be one that is loaded: none is"):
        llm.generate(PROMPT, GREEDY, adapter="code")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora": ("no folder",)}, "lora must be NAME=FOLDER"),
        ({"lora": ("a=x", "a=y")}, "lora must be NAME=FOLDER of different names"),
        ({"lora": ("a=x", "b=y"), "max_loras": 1}, "max_loras must be 0 or at least 2, as many as are given"),
        (
            {"max_loras": 1, "num_processes": 2, "coordinator": "h:7000"},
            "lora and max_loras need num_processes to be 1, got 2; merge the adapter into the weights",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(**(DEMO | options))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_targets_have_adapters(folders: dict[str, Path], quantize: str) -> None:
    """Their products are those of the quantised weights, so only texts of the same weights can be compared."""
    options = DEMO | ROOM | {"token_edges": (64,), "quantize": quantize, "lora": (f"code={folders['code']}",)}
    with LLM(**options) as llm:
        found = {}
        for policy in ("ar", "adaserve"):
            llm.set_policy(policy)
            outputs = llm.generate([PROMPT] * 2, GREEDY, adapter=["code", ""], slo=SLO(tpot_ms=0.5))
            found[policy] = [output.token_ids for output in outputs]
        assert llm.stats().compiles_after_ready == 0
    assert found["ar"] == found["adaserve"]
    assert found["ar"][0] != found["ar"][1]
