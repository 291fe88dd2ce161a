"""Broken workload files: each is refused with file, line and field, whatever the format, and nothing else is raised."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.readers import FORMATS, find_format, source
from adaserve_jax.workloads.readers.format import Gaps
from adaserve_jax.workloads.readers.source import Source
from adaserve_jax.workloads.traces import load_trace, trace_of
from adaserve_jax.workloads.workload import load_workload, parse_slos
from tests.bench.test_readers import SAMPLES, sample, source_of

EMISSION = '{"emission_time_ms": 0, "input_length": 1, "output_length": 1, "prompt": "p", "slo_ratio": 1'
TRACE = '{"t_ms": 0, "prompt_id": "a-1", "slo_ratio": 1, "output_length": 1, "input_length": 1'
BATCH = '"custom_id": "1", "method": "POST", "url"'
CHATS, TEXTS = '"/v1/chat/completions"', '"/v1/completions"'
IMAGE = '{"role": "user", "content": [{"type": "image_url"}]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,G,4,1,5,API log\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]'

BROKEN = [
    ("adaserve", f'[{EMISSION}}},\n{EMISSION}, "input_length": 0}}]', ":2: input_length: expected an integer from 1"),
    ("adaserve", f'[{EMISSION}, "slo_ratio": "x"}}]', ":1: slo_ratio: expected a finite number .*got 'x'"),
    ("adaserve", f'[{EMISSION}, "prompt": ""}}]', ":1: prompt: expected a non-empty string, got ''"),
    ("adaserve", f'[{EMISSION}, "prompt": "\\ud800"}}]', ":1: prompt: expected a non-empty string"),
    ("adaserve", f'[{EMISSION}, "emission_time_ms": -1}}]', ":1: emission_time_ms: expected a finite number from 0"),
    ("adaserve", f"[{EMISSION}}}\n{EMISSION}}}]", ":1: expected a comma or the end of the array after this object"),
    ("adaserve", f"[{EMISSION}}},\n]", ":1: expected another object after the comma"),
    ("adaserve", f"[{EMISSION}}},\n7]", ":2: expected a JSON object, got int"),
    ("adaserve", f"[{EMISSION}}},\n{EMISSION}", ":2: expected a JSON object, got invalid JSON"),
    ("adaserve", f"[{EMISSION}}}] 5", ": expected nothing after the end of the JSON array"),
    ("adaserve-trace", f'{TRACE}}}\n{TRACE}, "t_ms": null}}', ":2: t_ms: expected a finite number .*got None"),
    ("adaserve-trace", f'{TRACE}, "prompt_id": 3}}', ":1: prompt_id: expected a non-empty string, got 3"),
    ("adaserve-trace", f'{TRACE}, "output_length": true}}', ":1: output_length: expected an integer"),
    ("humaneval", '{"task_id": "a", "prompt": "p"}\n\n{"task_id": "b"}', ":3: prompt: expected .*, got nothing"),
    ("humaneval", '{"task_id": 3, "prompt": "p"}', ":1: task_id: expected a non-empty string, got 3"),
    ("gsm8k", '{"question": ["q"], "answer": "a"}', r":1: question: expected a non-empty string, got \['q'\]"),
    ("spec-bench", '{"category": "qa", "turns": []}', r":1: turns: expected a non-empty list of texts, got \[\]"),
    ("spec-bench", '{"category": "qa", "turns": ["a", 4]}', r":1: turns\[1\]: expected a non-empty string, got 4"),
    ("spec-bench", '{"category": "", "turns": ["a"]}', ":1: category: expected a non-empty string"),
    ("alpaca", '{"instruction": "a", "input": 3}', ":1: input: expected a string, got 3"),
    ("alpaca", '{"instruction": "a"}\n{"input": "a"}', ":2: instruction: expected a non-empty string, got nothing"),
    ("openai-batch", f'{{{BATCH}: {CHATS}}}', ":1: body: expected a JSON object, got nothing"),
    ("openai-batch", f'{{{BATCH}: "/v1/embeddings", "body": {{}}}}', ":1: url: expected '/v1/chat/completions' or"),
    ("openai-batch", f'{{{BATCH}: {CHATS}, "method": "GET", "body": {{}}}}', ":1: method: expected 'POST', got 'GET'"),
    ("openai-batch", f'{{{BATCH}: {CHATS}, "body": {{}}, "x": 1}}', ":1: unknown field 'x'; known fields are"),
    ("openai-batch", f'{{{BATCH}: {CHATS}, "body": {{}}}}', ":1: body: messages: expected a non-empty list"),
    ("openai-batch", f'{{{BATCH}: {CHATS}, "body": {{"messages": [{IMAGE}]}}}}', ":1: body: messages: expected a"),
    ("openai-batch", f'{{{BATCH}: {TEXTS}, "body": {{"prompt": [1, 2]}}}}', ":1: body: prompt: expected a"),
    ("openai-batch", f'{{{BATCH}: {TEXTS}, "body": {{"prompt": "a", "slo_tpot_ms": "x"}}}}', ":1: body: slo_tpot_ms: "),
    ("openai-batch", f'{{{BATCH}: {TEXTS}, "body": {{"prompt": "a"}}}}\n' * 2, ":2: custom_id: expected one that"),
    ("azure", AZURE + "yesterday,374,44\n", ":3: TIMESTAMP: expected a time as .*, got 'yesterday'"),
    ("azure", AZURE + "2023-11-31 18:15:46,374,44\n", ":3: TIMESTAMP: expected a time as"),
    ("azure", AZURE + "2023-11-16 18:15:46+99:00,374,44\n", ":3: TIMESTAMP: expected a time as"),
    ("azure", AZURE + "2023-11-16 18:15:46,374\n", ":3: expected 3 fields, got 2"),
    ("azure", AZURE + "2023-11-16 18:15:46,-1,44\n", r":3: ContextTokens: expected an integer from 0 .*got '-1'"),
    ("azure", AZURE + "2023-11-16 18:15:46,374,1e3\n", ":3: GeneratedTokens: expected an integer"),
    ("azure", AZURE + "2023-11-16 18:15:46,374,1048577\n", ":3: GeneratedTokens: expected an integer"),
    ("azure", AZURE + f"2023-11-16 18:15:46,374,{'9' * 5000}\n", ":3: GeneratedTokens: expected an integer"),
    ("azure", AZURE + f"{'9' * 200_000},374,4\n", ":3: expected a row of a table, got field larger than field limit"),
    ("mooncake", f'{MOONCAKE}, "hash_ids": [1]}}', r":1: hash_ids: expected 2 whole numbers, one for every 512 tokens"),
    ("mooncake", f'{MOONCAKE}, "hash_ids": [1, true]}}', ":1: hash_ids: expected 2 whole numbers"),
    ("mooncake", f'{MOONCAKE}, "more": 3}}', ":1: unknown field 'more'; known fields are timestamp"),
    ("mooncake", f'{MOONCAKE}, "timestamp": 1e400}}', ":1: timestamp: expected a finite number .*got inf"),
    ("burstgpt", BURST + "5,G,4,1,5,Telex\n", ":3: Log Type: expected 'Conversation log' or 'API log', got 'Telex'"),
    ("burstgpt", BURST + "soon,G,4,1,5,API log\n", ":3: Timestamp: expected a finite number .*got 'soon'"),
    ("burstgpt", BURST + "nan,G,4,1,5,API log\n", ":3: Timestamp: expected a finite number"),
    ("burstgpt", BURST + "5,G,4.5,1,5,API log\n", ":3: Request tokens: expected an integer .*got '4.5'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), BROKEN)
@pytest.mark.parametrize("packed", [False, True])
def test_file_line_and_field_are_named(tmp_path: Path, name: str, text: str, message: str, packed: bool) -> None:
    path = tmp_path / ("bad.gz" if packed else "bad")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with pytest.raises(ConfigError, match=f"{path.name}{message}"):
        load_workload(path, format=name)


def test_what_is_no_file_of_bounded_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, false = gzip.compress(b"x" * 100)[:-9], b"\x1f\x8b\x08" + b"7" * 40
    for name, data in (("cut.gz", cut), ("plain.gz", b"{}"), ("false.gz", false)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=rf"cannot read workload .*{name}: .*; give the path of a file"):
            load_workload(tmp_path / name)
    with pytest.raises(ConfigError, match=r"cannot read workload .*; give the path of a file, .gz or plain"):
        load_workload(tmp_path)
    path = tmp_path / "w.csv"
    path.write_text(AZURE + "2023-11-16 18:15:47,1,1\n" * 2)
    monkeypatch.setattr(source, "MOST_REQUESTS", 2)
    with pytest.raises(ConfigError, match=r"w.csv:4: expected at most 2 requests; cut the file"):
        load_workload(path)
    monkeypatch.setattr(source, "MOST_BYTES", 20)
    with pytest.raises(ConfigError, match=r"w.csv has more than 20 bytes uncompressed; cut it"):
        load_workload(path)
    path.write_text(AZURE.partition("\n")[0])
    monkeypatch.setattr(source, "MOST_BYTES", 2000)
    with pytest.raises(ConfigError, match=r"w.csv holds no request"):
        load_workload(path)


@pytest.mark.parametrize("name", ["azure", "adaserve-trace"])
def test_a_file_of_too_many_requests_is_to_be_cut(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = len(sample(tmp_path, name).items)
    monkeypatch.setattr(source, "MOST_REQUESTS", requests - 1)
    with pytest.raises(ConfigError, match=rf"w\.txt:\d+: expected at most {requests - 1} requests; cut the file"):
        sample(tmp_path, name)
    monkeypatch.setattr(source, "MOST_REQUESTS", requests)
    assert len(sample(tmp_path, name).items) == requests


def test_deep_nesting_is_refused_at_any_depth() -> None:
    for depth in (100, 900, 1000, 3000, 100_000):
        text = '{"task_id": "a", "prompt": ' + "[" * depth + "]" * depth + "}"
        with pytest.raises(ConfigError, match=r"w:1: (prompt: expected a non-empty string|expected one JSON object)"):
            list(find_format("humaneval", source_of(text)).read(source_of(text), Gaps()))


def read_all(data: bytes, name: str) -> None:
    """Read by name and by content; nothing but ConfigError may come of it."""
    for asked in (name, "auto"):
        made = Source("w", "w", data, None)
        try:
            list(find_format(asked, made).read(made, Gaps()))
        except ConfigError as error:
            str(error).encode()


@settings(max_examples=30)
@given(st.binary(max_size=200), st.sampled_from(FORMATS))
@example(b"[", "adaserve")
@example(b'{"a', "jsonl")
@example(b'"\n', "azure")
def test_any_bytes_are_read_or_refused(data: bytes, name: str) -> None:
    read_all(data, name)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800")
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=30)
@given(st.data(), st.sampled_from([name for name in FORMATS if SAMPLES[name].lstrip()[0] in "[{"]))
def test_any_field_of_a_request_may_be_anything(data: st.DataObject, name: str) -> None:
    """The sample's first request with fields replaced, left out or added."""
    text = SAMPLES[name]
    first = json.loads(text)[0] if text.startswith("[") else json.loads(text.partition("\n")[0])
    target = first["body"] if "body" in first and data.draw(st.booleans()) else first
    for field in data.draw(st.lists(st.sampled_from([*sorted(target), "more", "\udfff"]), min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            target[field] = data.draw(VALUES)
        else:
            target.pop(field, None)
    read_all(json.dumps([first] if text.startswith("[") else first).encode(), name)


@given(st.data(), st.sampled_from(["azure", "burstgpt"]))
def test_any_cell_of_a_table_may_be_anything(data: st.DataObject, name: str) -> None:
    header, row = SAMPLES[name].splitlines()[:2]
    cells = row.split(",")
    odd = st.sampled_from(["", "0", "-0", "1e5", "inf", "9" * 400, "٣", "1_0", "9999-12-31 23:59:59", '"', "\x00"])
    cells[data.draw(st.integers(0, len(cells) - 1))] = data.draw(odd | st.text(max_size=12))
    read_all("\n".join((header, ",".join(cells))).encode(errors="replace"), name)


def test_simulations_need_lengths_and_times(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"workload w.jsonl has texts and not the lengths that a simulation needs"):
        load_trace(path)
    timeless = Workload("t", "h", tuple(replace(item, arrival_s=None) for item in sample(tmp_path, "azure").items))
    with pytest.raises(ConfigError, match="workload t says no times, which a simulation needs; give a trace"):
        trace_of(timeless)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected class:field=number such as .*, got ''"),
        ("code", "expected class:field=number .*, got 'code'"),
        ("code:tpot=50;", "expected class:field=number .*, got ''"),
        ("code:tpot=50;code:ttft=4", "class 'code' is named twice"),
        ("code:speed=3", "class code: expected each of tpot, ttft, relative, e2e at most once, or none, got 'speed=3'"),
        ("code:tpot=3,tpot=4", "class code: expected each of .* at most once"),
        ("code:tpot=x", "class code: tpot: expected a number, got 'x'"),
        ("code:tpot=-1", "class code: .*above 0"),
        ("code:tpot=nan", "class code: .*finite"),
        ("code:tpot=50,relative=2", "class code: .*absent"),
    ],
)
def test_broken_targets_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"slos: {message}"):
        parse_slos(text)


@given(st.text(alphabet="ab:;,=*.19e- tpofrelaiv", max_size=30))
def test_any_targets_are_read_or_refused(text: str) -> None:
    with suppress(ConfigError):
        parse_slos(text)
