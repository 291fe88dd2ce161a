"""The configuration refuses wrong types and values where it is made, not after minutes of loading."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax import DrafterConfig, EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig, LearnOptions
from adaserve_jax.models.config import DEMO_FOLDER
from adaserve_jax.scheduler.policies import policy_of


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("target", (None, 5), "a name or a path"),
        ("draft", (5,), "a name or a path"),
        ("compile_cache", (5,), "a path"),
        ("policy", (None,), "the name of a policy"),
        ("deterministic", ("yes", 1), "true or false"),
        ("eq8_eq9", (None,), "true or false"),
        ("max_requests", (-1, 2.5, True, "3"), "an integer >= 0"),
        ("max_context", (7, 1), "0 or an integer >= 8"),
        ("max_waiting", (0, "x"), "an integer >= 1"),
        ("num_pages", (-1, 1.0), "an integer >= 0"),
        ("seed", (-1, 0.5, None), "an integer >= 0 of less than 64 bits"),
        ("page_size", (0, 7, 16.5, "16"), "one of 8, 16, 32, 64, 128"),
        ("max_depth", (0, 17, 2.5, "3"), "an integer from 1 to 16"),
        ("max_width", (0, 17), "an integer from 1 to 16"),
        ("token_edges", (5, (4, 4), (0,), (8, 4), ("a",)), "increasing integers >= 1"),
        ("row_edges", ((2, 1),), "increasing integers >= 1"),
        ("dtype", ("f64", 3), "one of auto, f32, bf16"),
        ("tp", (0, "2"), "an integer >= 1"),
        ("num_processes", (0, 2.0), "an integer >= 1"),
        ("process_id", (-1,), "an integer >= 0"),
        ("process_id", (1,), r"below num_processes \(1\)"),
        ("drafts", ("a=b", ("a",), ("=b",), ("a=",), ("a b=c",), (3,)), "NAME=FOLDER, beside a draft"),
        ("drafts", (("a=b", "a=c"), ("default=b",)), "of different names, none of them default"),
        ("route", ("mood", None), "one of tag, language, topic"),
        ("learning", ({"learn_every": 3}, True), "a LearnConfig"),
        ("drafter", ({"drafter": "grpc://h:1"}, "grpc://h:1"), "a DrafterConfig"),
        ("coordinator", (7, "host:7000"), "(a text|none while num_processes is 1)"),
    ],
)
def test_wrong_values(field: str, values: tuple[object, ...], expected: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{field} must be .*{expected}, got "):
            EngineConfig(**{field: value})


@pytest.mark.parametrize(
    "address",
    [None, "host", "host:", ":7000", "host:port", "host:0", "host:65535", "host:70000", "host:" + "1" * 5000],
    ids=lambda address: str(address)[:10],
)
def test_several_processes_need_an_address_with_room_for_two_ports(address: str | None) -> None:
    with pytest.raises(ConfigError, match="coordinator must be host:port of process 0 where num_processes > 1, got "):
        EngineConfig(num_processes=2, coordinator=address)
    assert EngineConfig(num_processes=2, process_id=1, coordinator="[::1]:7000").process_id == 1


def test_what_learns_is_a_draft_in_one_process() -> None:
    with pytest.raises(ConfigError, match=r"^learning needs a draft that learns, and draft is none$"):
        EngineConfig(draft=None, learning=LearnConfig())
    with pytest.raises(ConfigError, match=r"^learning needs num_processes to be 1, got 2$"):
        EngineConfig(learning=LearnConfig(), num_processes=2, coordinator="host:7000")


def test_the_embedded_draft_goes_with_targets_of_its_tokenizer(tmp_path: Path) -> None:
    grown, other = tmp_path / "grown", tmp_path / "other"
    for folder in (grown, other):
        folder.mkdir()
    embedded = (DEMO_FOLDER / "target" / "tokenizer.json").read_bytes()
    (grown / "tokenizer.json").write_bytes(embedded)
    (other / "tokenizer.json").write_bytes(embedded.replace(b"def", b"fed", 1))
    folders = "demo", grown, other, tmp_path, "a" * 300, "~nobody-of-this-name/x"
    found = {folder: EngineConfig(target=str(folder)).draft for folder in folders}
    assert found == dict.fromkeys(folders, None) | {"demo": "demo", grown: "demo"}
    assert EngineConfig(target=str(other), draft="demo").draft == "demo" and EngineConfig(draft=None).draft is None


DRAFTER = DrafterConfig(("grpc://host:7070",))


def test_a_drafter_stands_in_the_place_of_a_draft() -> None:
    for given in ("auto", "demo", None):
        config = EngineConfig(draft=given, drafter=DRAFTER)
        assert (config.draft, config.draft_names, config.speculates) == (None, (), True)
        assert dataclasses.replace(config, policy="ar").drafter == DRAFTER
    assert policy_of(EngineConfig(drafter=DRAFTER, policy="spec:6")).needs_draft
    assert EngineConfig().speculates and not EngineConfig(draft=None).speculates


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"deterministic": True},
            "^deterministic must be left out with synthetic_acceptance: it makes the target's text",
        ),
        ({"learning": LearnConfig()}, "^learning must be left out with synthetic_acceptance: a draft learns"),
        ({"calibration": "a.json"}, "^calibration must be left out with synthetic_acceptance: the chances"),
        ({"draft_sources": "suffix"}, "^draft_sources must be left out with synthetic_acceptance: only a model's"),
        (
            {"num_processes": 2, "tp": 2, "coordinator": "127.0.0.1:9000"},
            "^num_processes must be left out with synthetic_acceptance: the other processes would accept",
        ),
    ],
)
def test_what_synthetic_acceptance_makes_meaningless_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(synthetic_acceptance="1.5", **options)
    assert not EngineConfig(synthetic_acceptance="1.5").may_draft_from_text
    without = EngineConfig(draft=None, synthetic_acceptance="1.5")
    assert dataclasses.replace(without, drafter=DRAFTER).speculates, "options of draft services are read later"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"draft": "a/b"},
            r"^draft must be left out with a drafter, .*, got 'a/b'; give it to `adaserve draft",
        ),
        ({"elastic": "on"}, r"^elastic must be off or auto with a drafter, got 'on': "),
        ({"drafts": ("code=a",)}, r"^drafts must be left out with a drafter, got 1; a draft service has one draft$"),
        (
            {"learning": LearnConfig()},
            r"^learning needs a draft of this engine; leave out the drafter, or ",
        ),
        ({"num_processes": 2, "coordinator": "h:7000"}, r"^drafter needs num_processes to be 1, got 2; leave out "),
    ],
)
def test_what_needs_a_draft_here_is_refused_with_a_drafter(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(drafter=DRAFTER, **options)


def test_drafts_have_names_in_order() -> None:
    several = EngineConfig(draft="d", drafts=("code=a", "maths=b=c"))
    assert several.draft_names == ("default", "code", "maths")
    assert several.draft_folders == {"default": "d", "code": "a", "maths": "b=c"}
    assert (EngineConfig().draft_names, EngineConfig(draft=None).draft_names) == (("default",), ())


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("learn_loss", ("mse", None), "one of kl, reverse_kl, jsd"),
        ("learn_positions", ("some",), "one of all, wrong"),
        ("learn_every", (0, 1.5, True), "an integer >= 1"),
        ("learn_buffer", (7,), "an integer >= 8"),
        ("learn_lora_rank", (-1,), "an integer >= 0"),
        ("learn_rate", (0, -1.0, float("nan"), "1"), "a finite number above 0"),
        ("learn_share", (1.1, -0.1, float("inf")), "a number from 0 to 1"),
        ("learn_held_out", (0.0, 1.0), "a number between 0 and 1"),
        ("learn_keep_records", (True,), "False without a learn_folder to keep them in"),
        ("learn_folder", (3,), "a path"),
    ],
)
def test_wrong_values_of_learning(field: str, values: tuple[object, ...], expected: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{field} must be {expected}, got "):
            LearnConfig(**{field: value})


@pytest.mark.parametrize("beta", [0, 1.0])
def test_a_mixture_of_jsd_has_a_share_of_both(beta: float) -> None:
    assert LearnConfig(learn_beta=beta).learn_beta == beta
    with pytest.raises(ConfigError, match=r"^learn_beta must be a number between 0 and 1 with learn_loss jsd, .* got "):
        LearnConfig(learn_loss="jsd", learn_beta=beta)


def test_options_of_learning_are_a_config_only_where_it_is_on() -> None:
    assert LearnOptions(learn=True, learn_every=3).chosen() == LearnConfig(learn_every=3)
    assert LearnOptions(learn_every=3).chosen() is None
    assert LearnOptions(learn_every=3).unused() == ["learn_every"]
    assert LearnOptions(learn=True, learn_every=3).unused() == []


def test_unknown_options_are_named() -> None:
    with pytest.raises(
        ConfigError, match="unknown option 'tagret', did you mean target; known options are attention, calibrate, "
    ):
        EngineConfig(tagret="demo")


def test_paths_become_text_and_lists_tuples() -> None:
    config = EngineConfig(target=Path("a/b"), draft=None, token_edges=[4, 8], page_size=16.0)  # type: ignore[arg-type]
    assert repr(config.page_size) == "16"
    assert (config.target, config.draft, config.token_edges) == ("a/b", None, (4, 8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.target = "other"  # type: ignore[misc]
