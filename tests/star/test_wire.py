"""Messages survive the wire; what makes no sense is told by field, costs its own message only, and nothing else is
raised."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.star import draft_pb2 as pb
from adaserve_jax.star import wire
from adaserve_jax.star.messages import Close, Draft, Hello, Load, Open, Refused, Resync, SessionSampling, Tree, Welcome
from adaserve_jax.star.wire import Caps, WireError

STAR = Path(wire.__file__).parent
INF, NAN = float("inf"), float("nan")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def tree(**changed: Any) -> Tree:
    plain = Tree(
        4, 2, 9, 17, 2, ints(0, 1, 2), ints(5, 6, 7), ints(-1, -1, 1), ints(0, 8, 3),
        np.array([-0.5, -0.25, 0.0], np.float32), 0.001, 0.002,
    )  # fmt: skip
    return dataclasses.replace(plain, **changed)


HELLO = Hello("target-1", "abc", "def", "v1", 1, 0.02, 0.01)
OPEN = Open(3, 1, ints(1, 2, 3), SessionSampling(2**64 - 1, 2, 0.5, 40, 0.75, 0.125))
DRAFT = Draft(3, 1, 8, 12, ints(4, 5), 4, 2, True, INF, 0.1)
FROM_TARGET = [HELLO, OPEN, DRAFT, dataclasses.replace(DRAFT, depth=0, width=0, tokens=ints(), due_s=-0.5), Close(3)]
WELCOME = Welcome("v1", 5, 4, 2048, 64, 60.0, {(1, 4): 0.001, (8, 4): 0.002}, {4: 0.001})
FROM_SERVICE = [
    WELCOME, Refused("too_long", "why", 3, 1, 0.5), tree(), tree(**dict.fromkeys(("index", "token", "parent", "cell"),
    ints()), log_q=np.zeros(0, np.float32)), Resync(3, 1), Resync(3, 0), Load(0.5, 0.25, 3, 2), Load(0.0, 0.0, 0, 0),
]  # fmt: skip


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        else:
            assert ours == theirs and type(ours) is type(theirs), field.name


def test_what_is_sent_is_what_is_received():
    for sent, read in (
        (FROM_TARGET, wire.read_target_frame(wire.target_frame(FROM_TARGET))),
        (FROM_SERVICE, wire.read_service_frame(wire.service_frame(FROM_SERVICE))),
    ):
        assert len(sent) == len(read)
        for one, other in zip(sent, read, strict=True):
            same(one, other)
    assert wire.read_target_frame(b"") == [] == wire.read_service_frame(b"")


def test_a_draft_keeps_nothing_of_its_frame_alive():
    """A session keeps its last Draft, of which the frame may have had hundreds, and one of them long."""
    long = dataclasses.replace(DRAFT, session=9, tokens=np.arange(5000, dtype=np.int32))
    none = dataclasses.replace(DRAFT, tokens=ints())
    for frame in ([DRAFT], [DRAFT, long, none, DRAFT], [none, long], [none]):
        read = wire.read_target_frame(wire.target_frame(frame))
        for sent, each in zip(frame, read, strict=True):
            same(sent, each)
            assert isinstance(each, Draft) and each.tokens.base is None


def test_numpy_numbers_are_sent_as_numbers():
    """As a mirror of rows has them."""
    odd = dataclasses.replace(
        DRAFT, session=np.int64(3), base=np.int32(12), depth=np.int64(4), calibrated=np.bool_(True), due_s=np.float64(1)
    )
    (read,) = wire.read_target_frame(wire.target_frame([odd]))
    same(read, dataclasses.replace(DRAFT, due_s=1.0))


CAPS = Caps(tokens=8, vocabulary=100, depth=5, width=4, messages=3, text=12)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (dataclasses.replace(HELLO, target_id=""), "Hello.target_id"),
        (dataclasses.replace(HELLO, target_id="x" * 13), "Hello.target_id"),
        (dataclasses.replace(HELLO, verify_s=NAN), "Hello.verify_s"),
        (dataclasses.replace(HELLO, plain_s=-1.0), "Hello.plain_s"),
        (dataclasses.replace(HELLO, plain_s=61.0), "Hello.plain_s"),
        (dataclasses.replace(HELLO, verify_s=INF), "Hello.verify_s"),
        (dataclasses.replace(HELLO, verify_s=1e300), "Hello.verify_s"),
        (dataclasses.replace(OPEN, session=0), "Open.session"),
        (dataclasses.replace(OPEN, tokens=ints(1, 100)), "Open.tokens"),
        (dataclasses.replace(OPEN, tokens=ints(-1)), "Open.tokens"),
        (dataclasses.replace(OPEN, tokens=ints(*range(9))), "Open.tokens"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(choice=-1)), "Open.choice"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(top_k=-1)), "Open.top_k"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(temperature=NAN)), "Open.temperature"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(temperature=-0.5)), "Open.temperature"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(temperature=INF)), "Open.temperature"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(top_p=0.0)), "Open.top_p"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(top_p=NAN)), "Open.top_p"),
        (dataclasses.replace(OPEN, sampling=OPEN.sampling._replace(min_p=1.5)), "Open.min_p"),
        (dataclasses.replace(DRAFT, session=0), "Draft.session"),
        (dataclasses.replace(DRAFT, tokens=ints(-7)), "Draft.tokens"),
        (dataclasses.replace(DRAFT, base=2**32 - 1), "Draft.base"),
        (dataclasses.replace(DRAFT, depth=6), "Draft.depth"),
        (dataclasses.replace(DRAFT, width=0), "Draft.width"),
        (dataclasses.replace(DRAFT, width=5), "Draft.width"),
        (dataclasses.replace(DRAFT, due_s=NAN), "Draft.due_s"),
        (dataclasses.replace(DRAFT, give_up_s=-1.0), "Draft.give_up_s"),
        (dataclasses.replace(DRAFT, give_up_s=NAN), "Draft.give_up_s"),
        (Close(0), "Close.session"),
    ],
)
def test_nonsense_of_a_target_is_told_by_field_and_costs_one_message(message: Any, field: str):
    good = dataclasses.replace(OPEN, session=77)
    read = wire.read_target_frame(wire.target_frame([good, message, Close(78)]), CAPS)
    same(read[0], good)
    same(read[2], Close(78))
    error = read[1]
    assert isinstance(error, WireError) and str(error).startswith(f"{field} must be ")
    assert (error.session, error.epoch) == (getattr(message, "session", 0), getattr(message, "epoch", 0))
    assert error.code == "invalid"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (tree(session=0), "Tree.session"),
        (tree(width=0), "Tree.width"),
        (tree(width=5), "Tree.width"),
        (tree(token=ints(5, 6)), "Tree.nodes"),
        (tree(cell=ints(1, 2, 3, 4)), "Tree.nodes"),
        (tree(log_q=np.zeros(2, np.float32)), "Tree.nodes"),
        (tree(log_q=np.zeros(21, np.float32)), "Tree.log_q"),
        (tree(index=ints(0, 2, 1)), "Tree.index"),
        (tree(index=ints(0, 1, 1)), "Tree.index"),
        (tree(index=ints(-1, 1, 2)), "Tree.index"),
        (tree(index=ints(0, 1, 10)), "Tree.index"),
        (tree(parent=ints(-1, -1, 2)), "Tree.parent"),
        (tree(parent=ints(-2, -1, 1)), "Tree.parent"),
        (tree(token=ints(0, 0, 100)), "Tree.token"),
        (tree(token=ints(0, -1, 9)), "Tree.token"),
        (tree(cell=ints(0, -2, 1)), "Tree.cell"),
        (tree(log_q=np.array([-1, NAN, -1], np.float32)), "Tree.log_q"),
        (tree(log_q=np.array([-1, 0.5, -1], np.float32)), "Tree.log_q"),
        (tree(queue_s=-1.0), "Tree.queue_s"),
        (tree(service_s=NAN), "Tree.service_s"),
        (dataclasses.replace(WELCOME, lease_s=0.0), "Welcome.lease_s"),
        (dataclasses.replace(WELCOME, max_depth=6), "Welcome.max_depth"),
        (dataclasses.replace(WELCOME, level_s={(1, 1): NAN}), "Welcome.level_times"),
        (dataclasses.replace(WELCOME, catchup_s=dict.fromkeys(range(4), 1.0)), "Welcome.catchup_times"),
        (dataclasses.replace(WELCOME, draft_version="x" * 13), "Welcome.draft_version"),
        (Refused("nonsense", "why", 3, 1), "Refused.code"),
        (Refused("full", "x" * 13), "Refused.message"),
        (Refused("full", "why", retry_after_s=INF), "Refused.retry_after_s"),
        (Resync(0, 1), "Resync.session"),
        (Load(NAN, 0.0, 1, 1), "Load.busy"),
    ],
)
def test_nonsense_of_a_service_is_told_by_field_and_costs_one_message(message: Any, field: str):
    read = wire.read_service_frame(wire.service_frame([tree(session=77), message, tree(session=78)]), CAPS)
    same(read[0], tree(session=77))
    same(read[2], tree(session=78))
    assert isinstance(read[1], WireError) and str(read[1]).startswith(f"{field} must be ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"level_s": {(0, 1): 0.001}}, "Welcome.level_times must be of rows at least 1, got 0"),
        ({"level_s": {(1, 0): 0.001}}, "Welcome.level_times must be of width at least 1, got 0"),
        ({"level_s": {(1, 1): 60.5}}, "Welcome.level_times must be of seconds from 0 to 60.0, got 60.5"),
        ({"catchup_s": {16: 0.001, 0: 0.001}}, "Welcome.catchup_times must be of tokens at least 1, got 0"),
        ({"catchup_s": {1: 1e308}}, "Welcome.catchup_times must be of seconds from 0 to 60.0, got 1e+308"),
    ],
)
def test_times_that_no_plan_could_take_are_told(changes: dict[str, Any], expected: str):
    (error,) = wire.read_service_frame(wire.service_frame([dataclasses.replace(WELCOME, **changes)]))
    assert isinstance(error, WireError) and str(error) == expected


def test_a_long_explanation_is_cut():
    (read,) = wire.read_service_frame(wire.service_frame([Refused("full", "why" * 1000)]))
    assert isinstance(read, Refused) and len(read.message) == Caps().text


def test_numbers_of_other_sizes_are_sent_as_they_should_be():
    odd = tree(index=np.arange(3), log_q=np.array([-0.5, -0.25, 0.0]))
    (read,) = wire.read_service_frame(wire.service_frame([odd]))
    same(read, tree())


def test_a_cut_array_is_told():
    frame = pb.ServiceFrame.FromString(wire.service_frame([tree()]))
    frame.messages[0].tree.log_q = b"12345"
    (error,) = wire.read_service_frame(frame.SerializeToString())
    assert "Tree.nodes must be 4 integers for each of 1.25 nodes, got 48 bytes" in str(error)


def test_errors_tell_no_tokens():
    secret = dataclasses.replace(OPEN, tokens=ints(31337, 4242))
    (error,) = wire.read_target_frame(wire.target_frame([secret]), CAPS)
    assert "31337" not in str(error) and "4242" not in str(error)


def test_a_frame_that_is_none_is_refused_whole():
    cases = {
        "a frame must be a protobuf TargetFrame": b"\xff\xff\xff garbage",
        "a message must be one of hello, open, draft, close": pb.TargetFrame(
            messages=[pb.FromTarget()]
        ).SerializeToString(),
        "a frame must have at most 3 messages, got 4": wire.target_frame([Close(1)] * 4),
        f"a frame must have at most {wire.MAX_FRAME_BYTES} bytes": bytes(wire.MAX_FRAME_BYTES + 1),
    }
    for message, data in cases.items():
        with pytest.raises(WireError) as raised:
            wire.read_target_frame(data, CAPS)
        assert message in str(raised.value)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes):
    for read in (wire.read_target_frame, wire.read_service_frame):
        with contextlib.suppress(WireError):
            assert isinstance(read(data), list)


@given(st.sampled_from(["target", "service"]), st.data())
def test_a_spoilt_frame_raises_nothing_else(side: str, data: st.DataObject):
    """Valid bytes with a few of them changed: most are protobuf still."""
    write, read, messages = {
        "target": (wire.target_frame, wire.read_target_frame, FROM_TARGET),
        "service": (wire.service_frame, wire.read_service_frame, FROM_SERVICE),
    }[side]
    spoilt = bytearray(write(messages))
    for _ in range(data.draw(st.integers(1, 4))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        assert isinstance(read(bytes(spoilt)), list)


@pytest.mark.parametrize("name", ["draft_pb2.py", "draft_pb2.pyi"])
def test_the_generated_code_is_of_this_protocol(name: str, tmp_path: Path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed; `make test` installs it")
    command = ["-m", "grpc_tools.protoc", f"-I{STAR}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, *command, str(STAR / "draft.proto")], check=True, timeout=60)
    assert (tmp_path / name).read_text() == (STAR / name).read_text()


@pytest.mark.parametrize("cap", ["MAX_FRAME_BYTES", "messages"])
def test_what_is_too_large_for_one_frame_goes_in_several(cap: str, monkeypatch: pytest.MonkeyPatch):
    if cap == "messages":
        monkeypatch.setattr(wire, "DEFAULT_CAPS", wire.Caps(messages=3))
    else:
        monkeypatch.setattr(wire, cap, 40)
    closes, resyncs = [Close(number) for number in range(1, 12)], [Resync(number, 2) for number in range(1, 12)]
    for write, read, said in (
        (wire.target_frame, wire.read_target_frame, closes), (wire.service_frame, wire.read_service_frame, resyncs),
    ):  # fmt: skip
        frames = wire.in_frames(write, said)
        assert len(frames) > 1 and [each for frame in frames for each in read(frame, wire.DEFAULT_CAPS)] == said
    assert wire.in_frames(wire.service_frame, []) == [b""]
