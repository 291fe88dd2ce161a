"""The packaged workload has the stated mix; a wrong line is refused with file, line and field."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO
from adaserve_jax.workloads.workload import load_workload


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_packaged_workload_is_60_20_20():
    workload = load_workload()
    assert Counter(item.slo_class for item in workload.items) == {"code": 36, "chat": 12, "summary": 12}
    by_class = {item.slo_class: item.slo for item in workload.items}
    assert (by_class["code"].relative, by_class["chat"].tpot_ms, by_class["summary"].tpot_ms) == (1.2, 50, 150)
    assert len({item.prompt for item in workload.items}) == 60
    assert not workload.has_arrivals


def test_every_field_is_read(tmp_path: Path):
    path = write(
        tmp_path / "w.jsonl",
        {"prompt": "a", "max_tokens": 7, "slo_class": "x", "slo_tpot_ms": 40, "slo_ttft_ms": 900, "temperature": 0,
         "seed": 5, "arrival_s": 1.5},
        {"messages": [{"role": "user", "content": "hi"}], "slo_relative": 1.2, "arrival_s": 2},
    )  # fmt: skip
    workload = load_workload(path)
    first, second = workload.items
    assert workload.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (first.prompt, first.max_tokens, first.slo_class, first.slo) == ("a", 7, "x", SLO(tpot_ms=40, ttft_ms=900))
    assert (first.sampling().seed, first.sampling().temperature, first.arrival_s) == (5, 0.0, 1.5)
    assert (second.prompt, second.messages[0].content, second.slo.relative) == (None, "hi", 1.2)
    assert (second.sampling().seed, second.max_tokens, second.slo_class) == (None, 64, "default")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "w.jsonl:2: expected one JSON object per line, got invalid JSON"),
        ("3", "w.jsonl:2: expected a JSON object, got int"),
        ('{"prompt": "a", "slo": 3}', "w.jsonl:2: unknown field 'slo'; known fields are prompt, messages"),
        ("{}", "w.jsonl:2: prompt: expected exactly one of prompt and messages"),
        ('{"prompt": ""}', "w.jsonl:2: prompt: expected a non-empty string, got ''"),
        ('{"prompt": "a", "max_tokens": 0}', "w.jsonl:2: max_tokens: expected an integer from 1 to 2147483647, got 0"),
        ('{"prompt": "a", "max_tokens": true}', "w.jsonl:2: max_tokens: expected an integer"),
        ('{"prompt": "a", "temperature": NaN}', "w.jsonl:2: temperature: expected a finite number from 0 to 100"),
        (
            '{"prompt": "a", "arrival_s": -1}',
            "w.jsonl:2: arrival_s: expected a finite number from 0 to 1e\\+10, got -1",
        ),
        ('{"prompt": "a", "slo_tpot_ms": -4}', "w.jsonl:2: slo_tpot_ms: .*a finite number above 0, got -4"),
        ('{"prompt": "a", "slo_tpot_ms": 4, "slo_relative": 2}', "w.jsonl:2: slo_relative: .*absent when slo_tpot_ms"),
        ('{"prompt": "a", "seed": "x"}', "w.jsonl:2: seed: expected an integer from 0 to"),
        ('{"messages": [{"role": "user"}]}', "w.jsonl:2: messages: expected a non-empty list"),
        ('{"prompt": "a", "slo_class": 3}', "w.jsonl:2: slo_class: expected a non-empty string, got 3"),
        ('{"prompt": "a", "arrival_s": 2}', "arrival_s must be on every line or on none, got 1 of 2"),
    ],
)
def test_wrong_lines_name_file_line_and_field(tmp_path: Path, line: str, message: str):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_workload(path)


def test_missing_empty_and_binary_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read workload .*none.jsonl: No such file"):
        load_workload(tmp_path / "none.jsonl")
    (tmp_path / "w.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        load_workload(tmp_path / "w.jsonl")
    (tmp_path / "w.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be UTF-8 text: "):
        load_workload(tmp_path / "w.jsonl")


def test_line_separators_inside_text_do_not_split_a_line(tmp_path: Path):
    (tmp_path / "w.jsonl").write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    assert load_workload(tmp_path / "w.jsonl").items[0].prompt == "one\u2028two"
