"""Every workload format: its sample in docs/workloads.md read by hand, found out, packed, and told apart."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Lengths, Message, Workload
from adaserve_jax.workloads.readers import FORMATS, find_format
from adaserve_jax.workloads.readers.source import Source
from adaserve_jax.workloads.traces import load_trace
from adaserve_jax.workloads.workload import load_workload, parse_slos

DOCS = Path(__file__).parents[2] / "docs" / "workloads.md"
SAMPLES = dict(re.findall(r"^## ([a-z0-9-]+)\n.*?```\n(.*?)```", DOCS.read_text(), re.DOTALL | re.MULTILINE))


def source_of(text: str) -> Source:
    return Source("w", "w", text.encode(), None)


def sample(tmp_path: Path, name: str, **options) -> Workload:
    """The documented sample of a format, as a file."""
    path = tmp_path / "w.txt"
    path.write_text(SAMPLES[name])
    return load_workload(path, **options)


def told(workload: Workload) -> list[tuple]:
    """What a format says of each request."""
    return [
        (item.prompt, item.slo_class, item.slo, item.max_tokens, item.arrival_s, item.lengths)
        for item in workload.items
    ]


def test_every_format_is_documented_with_a_sample() -> None:
    assert sorted(SAMPLES) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_samples_are_found_out_and_may_be_packed(tmp_path: Path, name: str) -> None:
    assert find_format("auto", source_of(SAMPLES[name])).name == name
    loaded, packed = sample(tmp_path, name, format=name), tmp_path / "w.gz"
    packed.write_bytes(gzip.compress(SAMPLES[name].encode()))
    again = load_workload(packed)
    assert (again.items, again.sha256, again.notes) == (loaded.items, loaded.sha256, loaded.notes)


def test_own_lines(tmp_path: Path) -> None:
    first, second = sample(tmp_path, "jsonl").items
    assert (first.prompt, first.max_tokens, first.slo, first.arrival_s) == (
        "Name three rivers.", 32, SLO(tpot_ms=50), 0.5,
    )  # fmt: skip
    assert second.messages == (Message("user", "Is 91 a prime?"),) and second.slo == SLO(relative=1.2, ttft_ms=4000)


@pytest.mark.parametrize("name", ["adaserve", "adaserve-trace"])
def test_adaserves_targets_are_multiples_or_milliseconds(tmp_path: Path, name: str) -> None:
    prompts, long = (("def half(x):\n", "Name a river."), (9, 5)) if name == "adaserve" else ((None, None), (104, 14))
    assert told(sample(tmp_path, name)) == [
        (prompts[0], "code", SLO(relative=1.2), 256, 0.0, Lengths(long[0], 256)),
        (prompts[1], "chat", SLO(tpot_ms=50), 256, 0.4125, Lengths(long[1], 256)),
    ]


def test_adaserves_other_targets_are_classes_of_their_own(tmp_path: Path) -> None:
    line = {"emission_time_ms": 0, "input_length": 1, "output_length": 1, "prompt": "p"}
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{**line, "slo_ratio": ratio} for ratio in (-150, -70.5, 0, 1e-320, 0.6)]))
    assert [(item.slo_class, item.slo) for item in load_workload(path).items] == [
        ("summarization", SLO(tpot_ms=150)), ("tpot 70.5 ms", SLO(tpot_ms=70.5)), ("default", SLO()),
        ("default", SLO()), ("code", SLO(relative=0.6)),
    ]  # fmt: skip


def test_a_traces_prompts_are_beside_it_class_by_class(tmp_path: Path) -> None:
    prompts = '{"id": "code-0096", "prompt": "def f():"}\n'
    (tmp_path / "prompts_code.jsonl.gz").write_bytes(gzip.compress(prompts.encode()))
    workload = sample(tmp_path, "adaserve-trace")
    assert [(item.prompt, item.by_length) for item in workload.items] == [("def f():", False), (None, True)]
    assert not workload.items[0].sampling().ignore_eos and workload.items[1].sampling().ignore_eos
    assert workload.sha256 != sample(tmp_path, "adaserve-trace", texts=False).sha256, "other texts, another workload"
    (tmp_path / "prompts_chat.jsonl").write_text('{"id": "chat-0001", "prompt": "hi"}\n')
    with pytest.raises(ConfigError, match=r"w.txt:2: prompt_id: expected an id of the file of prompts of class chat"):
        sample(tmp_path, "adaserve-trace")
    assert load_trace(tmp_path / "w.txt").classes == ["chat", "code"], "a simulation needs no text"


def test_texts_without_targets(tmp_path: Path) -> None:
    none = (SLO(), 256, None, None)
    code = 'def half(x):\n    """Half of x."""\n'
    assert told(sample(tmp_path, "humaneval")) == [(code, "code", *none)]
    question = "Two boxes hold three pens each. How many pens are there?"
    assert told(sample(tmp_path, "gsm8k")) == [(question, "math", *none)]
    assert told(sample(tmp_path, "alpaca")) == [
        ("Turn the sentence into a question.\n\nIt rains.", "chat", *none), ("Name a river.", "chat", *none),
    ]  # fmt: skip


def test_spec_bench_replays_first_turns(tmp_path: Path) -> None:
    workload = sample(tmp_path, "spec-bench")
    assert told(workload) == [("Write a line about rain.", "mt_bench", SLO(), 256, None, None)]
    assert workload.notes == ("left out: 1 later turns of conversations",)
    (tmp_path / "w.txt").write_text('{"category": "rag", "turns": ["One."]}')
    assert (load_workload(tmp_path / "w.txt").items[0].slo_class, load_workload(tmp_path / "w.txt").notes) == (
        "rag",
        (),
    )


def test_speed_bench_keeps_its_categories_and_leaves_out_what_is_not_fetched(tmp_path: Path) -> None:
    assert told(sample(tmp_path, "speed-bench")) == [("Write a queue.", "coding", SLO(), 256, None, None)]
    masked = {"category": "math", "src_id": "1", "turns": [
        "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}  # fmt: skip
    lines = [masked, {"category": "math", "src_id": "2", "turns": ["1 + 1?", "And 2 + 2?"]}]
    (tmp_path / "w.txt").write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = load_workload(tmp_path / "w.txt")
    assert [(item.prompt, item.slo_class) for item in workload.items] == [("1 + 1?", "math")]
    assert workload.notes == (
        "left out: 1 later turns of conversations",
        "left out: 1 prompts that SPEED-Bench's prepare.py has yet to fetch",
    )
    (tmp_path / "w.txt").write_text(json.dumps(masked))
    with pytest.raises(ConfigError, match=r"every prompt is still to be fetched; run SPEED-Bench's prepare\.py"):
        load_workload(tmp_path / "w.txt")


def test_batches_of_chats_and_completions(tmp_path: Path) -> None:
    chat, completion = sample(tmp_path, "openai-batch").items
    assert (chat.prompt, chat.messages, chat.max_tokens) == (None, (Message("user", "Name a river."),), 32)
    assert (completion.prompt, completion.slo, completion.max_tokens) == ("Once", SLO(tpot_ms=50), 256)
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "max_completion_tokens": 5, "max_tokens": 9, "temperature": 0, "seed": 3, "top_p": 0.5, "logprobs": None,
        "slo_class": "x",
    }  # fmt: skip
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "w.txt").write_text(json.dumps(line))
    workload = load_workload(tmp_path / "w.txt")
    (item,) = workload.items
    assert (item.messages[0].content, item.max_tokens, item.temperature, item.seed, item.slo_class) == (
        "a\nb", 5, 0.0, 3, "x",
    )  # fmt: skip
    assert workload.notes == ("left out: 1 'top_p' in the bodies of requests",)


def test_azures_times_count_from_the_earliest(tmp_path: Path) -> None:
    rows = (
        "2024-05-10 00:00:01.259930+00:00,9,7",
        "2024-05-10 02:00:00.009930+02:00,374,44",
        "2024-05-10T00:00:09Z,5,0",
    )
    path = tmp_path / "w.csv"
    path.write_text("\r\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)) + "\r\n")
    workload = load_workload(path)
    assert told(workload) == [
        (None, "default", SLO(), 7, 1.25, Lengths(9, 7)), (None, "default", SLO(), 44, 0.0, Lengths(374, 44)),
    ]  # fmt: skip
    assert workload.notes == ("left out: 1 requests without a prompt or an answer",)
    trace = load_trace(path, slo_class="chat")
    assert [(r.due_s, r.prompt_tokens, r.slo_class) for r in trace.requests] == [(0.0, 374, "chat"), (1.25, 9, "chat")]
    assert trace.notes == workload.notes and trace.derived("x", trace.requests).notes == workload.notes
    assert [item.arrival_s for item in sample(tmp_path, "azure").items] == [0.0, 4.314579]


def test_empty_lines_of_a_table_are_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,374,44", "2023-11-16 18:15:48,5,6"]
    for text in ("\n".join(rows), "\n".join(["", rows[0], "", "", *rows[1:], "", ""]), "\r\n\r\n".join(rows)):
        path.write_bytes(text.encode())
        items = load_workload(path).items
        assert [(item.arrival_s, item.lengths) for item in items] == [(0.0, Lengths(374, 44)), (2.0, Lengths(5, 6))]


def test_mooncakes_blocks_and_burstgpts_logs(tmp_path: Path) -> None:
    assert told(sample(tmp_path, "mooncake")) == [
        (None, "default", SLO(), 52, 0.0, Lengths(700, 52, (46, 47))),
        (None, "default", SLO(), 8, 3.0, Lengths(513, 8, (46, 48))),
    ]
    workload = sample(tmp_path, "burstgpt")
    assert told(workload) == [
        (None, "chat", SLO(), 18, 0.0, Lengths(472, 18)), (None, "api", SLO(), 20, 115.0, Lengths(300, 20)),
    ]  # fmt: skip
    assert workload.notes == ("left out: 1 requests without a prompt or an answer",)
    line = {"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [1]}
    unasked = {"timestamp": 9, "input_length": 0, "output_length": 3, "hash_ids": []}
    (tmp_path / "w.txt").write_text("\n".join(map(json.dumps, (line, {**line, "output_length": 2}, unasked))))
    answered = load_workload(tmp_path / "w.txt")
    assert told(answered) == [(None, "default", SLO(), 2, 0.0, Lengths(5, 2, (1,)))]
    assert answered.notes == ("left out: 2 requests without a prompt or an answer",)
    later = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    (tmp_path / "w.txt").write_text(later + "5.5,s,1.25,GPT-4,7,3,10,API log\n")
    assert told(load_workload(tmp_path / "w.txt")) == [(None, "api", SLO(), 3, 0.0, Lengths(7, 3))]


def test_what_fits_several_formats_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"instruction": "Add.", "question": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(
        ConfigError, match=r"w.jsonl looks like several formats \(gsm8k, alpaca\).*say --format, one of"
    ):
        load_workload(path)
    assert load_workload(path, format="alpaca").items[0].prompt == "Add."
    for text in ('{"text": "a"}', "time,tokens\n1,2\n", "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"w.jsonl looks like no known format: its first request has"):
            load_workload(path)
    with pytest.raises(ConfigError, match="no workload format 'csv'; give auto or one of jsonl, adaserve"):
        load_workload(path, format="csv")


def test_what_fills_gaps_is_in_name_and_hash(tmp_path: Path) -> None:
    plain = sample(tmp_path, "gsm8k")
    filled = sample(tmp_path, "gsm8k", max_tokens=9, temperature=0.0, slo_class="x", slos=parse_slos("x:tpot=50"))
    (item,) = filled.items
    assert (item.max_tokens, item.temperature, item.slo_class, item.slo) == (9, 0.0, "x", SLO(tpot_ms=50))
    assert filled.name == "w.txt class x max tokens 9 temperature 0.0 targets x:tpot=50"
    hashes = {plain.sha256, filled.sha256, *(sample(tmp_path, "gsm8k", max_tokens=n).sha256 for n in (9, 10))}
    assert len(hashes) == 4
    assert sample(tmp_path, "openai-batch", max_tokens=9).items[0].max_tokens == 32, "of those that do not say"
    for options in ({"max_tokens": 0}, {"temperature": 101.0}, {"temperature": float("nan")}):
        with pytest.raises(ConfigError, match=r"max tokens must be at least 1|temperature must be from 0 to 100"):
            sample(tmp_path, "gsm8k", **options)
