"""The service over real sockets, with a toy for its device: every stream gets its own answers, whatever others do."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from adaserve_jax.errors import ConfigError
from adaserve_jax.star import draft_pb2 as pb
from adaserve_jax.star.messages import Close, Refused, Resync, Tree
from adaserve_jax.star.service.limits import Quotas
from adaserve_jax.star.service.server import HEALTH_CALLS_OF_ONE, DraftServer, check_free
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.star.wire import MAX_FRAME_BYTES, SERVICE, Caps, target_frame
from tests.star.streams import HANG_S, Target, health, toy_service, until
from tests.star.toys import PLAIN, ToyDevice, columns_of, draft, hello, opened, toy_columns

TEXT = [1, 2, 3, 4, 5]


def is_right(tree: Any, text: list[int], depth: int = 2, width: int = 2) -> bool:
    return isinstance(tree, Tree) and columns_of(tree) == toy_columns(text, PLAIN, depth, width, True)


def rounds(target: Target, session: int, first: int = 1, count: int = 3) -> None:
    """Open a session and draft some rounds in it, each of which must come out right."""
    target.send(opened(session, 1, TEXT), draft(session, 1, first, len(TEXT), [], give_up_s=HANG_S))
    text = list(TEXT)
    assert is_right(target.receive(), text)
    for number in range(first + 1, first + count):
        new = [number % 7, session % 7]
        target.send(draft(session, 1, number, len(text), new, give_up_s=HANG_S))
        text += new
        tree = target.receive()
        assert is_right(tree, text) and (tree.session, tree.round, tree.length) == (session, number, len(text))
        assert tree.queue_s >= 0 and tree.service_s > 0


def test_targets_have_their_own_trees_at_the_same_time():
    with toy_service() as service, service.target("a") as a, service.target("b") as b:
        failures: list[BaseException] = []

        def draft_on(target: Target) -> None:
            try:
                for session in range(1, 6):
                    rounds(target, session)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=draft_on, args=(target,)) for target in (a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        assert not failures
        a.send(*map(Close, range(1, 6)), draft(1, 1, 9, 5, []))
        assert a.receive() == Resync(1, 1), "it is closed"
        assert service.core.num_sessions == 5, "of b"


def test_what_comes_while_the_device_works_is_taken_in_and_answered_after():
    begun, go_on = threading.Event(), threading.Event()

    class Held(ToyDevice):
        def run(self, batch):
            begun.set()
            assert go_on.wait(HANG_S)
            return super().run(batch)

    with toy_service(device=Held) as service, service.target("a") as a, service.target("b") as b:
        a.send(opened(1, 1, TEXT), draft(1, 1, 1, 5, [], give_up_s=HANG_S))
        assert begun.wait(HANG_S)
        for session in (1, 2, 3):
            b.send(opened(session, 1, TEXT), draft(session, 1, 1, 5, [], give_up_s=HANG_S))
        until(lambda: service.worker._inbox.qsize() >= 3)
        go_on.set()
        assert is_right(a.receive(), TEXT)
        assert all(is_right(b.receive(), TEXT) for _ in range(3))


# ---- ends ----


def test_a_target_that_comes_back_goes_on_with_what_is_held():
    with toy_service() as service, service.target("a") as first:
        rounds(first, 1)
        with service.target("a") as second:  # the first stream is taken for dead
            assert first.rest() == []
            assert service.core.num_sessions == 1
            second.send(opened(1, 2, [*TEXT, 9]), draft(1, 2, 9, 6, [], give_up_s=HANG_S))
            assert is_right(second.receive(), [*TEXT, 9])
    assert service.pages.held, "its lease goes on"


def test_the_end_of_a_stream_is_told_after_its_last_frame():
    told: list[str] = []
    read, over = threading.Event(), threading.Event()

    class Slow:
        def receive(self, stream: Any, frame: Any) -> None:
            read.set()
            assert over.wait(HANG_S)
            told.append("frame")

        def disconnect(self, stream: Any) -> None:
            told.append("end")

    server = DraftServer(DraftServiceSettings(listen="127.0.0.1:0", http=""), Slow(), Caps(1024, 100))
    server.start()
    target = Target(server.port)
    target.send(hello("a"))
    assert read.wait(HANG_S)
    target.close()
    until(lambda: server.audit.streams == 0)
    assert server.stop(0.0).wait(HANG_S)
    over.set()
    until(lambda: len(told) == 2)
    assert told == ["frame", "end"]


def test_a_device_that_fails_answers_empty_trees_and_ends_the_service_if_it_goes_on():
    class Failing:
        def run(self, batch):
            raise RuntimeError("no device")

    with toy_service(device=lambda *_: Failing()) as service, service.target("a") as target:
        for number in (1, 2, 3):
            target.send(opened(number, 1, TEXT), draft(number, 1, 1, 5, [], give_up_s=HANG_S))
            tree = target.receive()
            assert isinstance(tree, Tree) and len(tree.index) == 0
        assert [each.code for each in target.rest() if isinstance(each, Refused)] == ["shutting_down"]
        assert service.worker.stop(HANG_S)
        assert service.dead == [True] and not service.worker.alive


# ---- what must not harm others ----


def raw(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as junk, contextlib.suppress(OSError):
        junk.sendall(data)
        junk.shutdown(socket.SHUT_WR)
        while junk.recv(4096):
            pass


def spoilt(port: int, *frames: Any) -> list[Any]:
    """Send these on a stream of their own; what is answered until it ends."""
    target = Target(port)
    try:
        for frame in frames:
            target.send(*frame) if isinstance(frame, tuple) else target.send(frame)
        return [each for each in target.rest() if type(each).__name__ != "Load"]
    finally:
        target.close()


def test_garbage_never_harms_others():
    with toy_service() as service, service.target("good") as good:
        rounds(good, 1)
        port, rng = service.port, np.random.default_rng(0)
        raw(port, rng.bytes(5000))
        raw(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.bytes(2000))
        rounds(good, 2)
        (junk,) = spoilt(port, b"\xff\xff\xff junk")
        assert junk.code == "invalid" and "protobuf" in junk.message
        (kindless,) = spoilt(port, pb.TargetFrame(messages=[pb.FromTarget()]).SerializeToString())
        assert kindless.code == "invalid"
        assert spoilt(port, bytes(MAX_FRAME_BYTES + 1)) == []
        (early,) = spoilt(port, (opened(1, 1, TEXT),))
        assert early.code == "invalid" and "Hello" in early.message
        (nameless,) = spoilt(port, (hello(""),))
        assert nameless.code == "invalid" and "target_id" in nameless.message
        (other,) = spoilt(port, (hello("x", vocabulary_hash="other"),))
        assert other.code == "vocabulary"
        with pytest.raises(grpc.RpcError) as raised, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.unary_unary("/adaserve.star.v1.DraftService/Other")(b"", timeout=HANG_S)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
        rounds(good, 3)
        assert service.server.audit.refused() == {"garbage": 2}
        assert service.worker.alive


def test_nonsense_costs_its_own_session():
    with toy_service() as service, service.target("a") as target:
        rounds(target, 1)
        rounds(target, 2)
        bad = draft(1, 1, 9, 9, [1], give_up_s=float("nan"))
        target.send(bad, draft(2, 1, 9, len(TEXT) + 4, [3], give_up_s=HANG_S))
        answers = sorted((target.receive() for _ in range(2)), key=lambda each: each.session)
        assert (answers[0].code, answers[0].session) == ("invalid", 1)
        assert is_right(answers[1], [*TEXT, 2, 2, 3, 2, 3])
        target.send(draft(1, 1, 10, 9, [1], give_up_s=HANG_S))
        assert target.receive() == Resync(1, 1), "the session has ended"
        target.send(opened(0, 1, TEXT), Close(0))
        rounds(target, 3)
        assert service.worker.stop(HANG_S)
        assert service.worker.snapshot.worker.nonsense == {"session": 1, "target": 2}, (
            "of no session: counted, not answered"
        )
        assert service.worker.snapshot.core.refused == {"invalid": 1}


def test_frames_are_paid_for_by_their_messages_and_their_bytes():
    """Whatever they say: greetings, ends, nonsense. The stream is read no further until it has paid."""
    taken: list[int] = []

    class Counts:
        def receive(self, stream, frame):
            taken.append(len(frame))
            stream.frame_taken()

        def disconnect(self, stream): ...

    server = DraftServer(DraftServiceSettings(listen="127.0.0.1:0", max_messages_per_s=0.1), Counts(), Caps())
    server.start()
    nonsense = draft(1, 1, 1, 5, [], give_up_s=float("nan"))
    frames = [hello()] * 3, [Close(1)] * 3, [nonsense] * 3, [opened(1, 1, [1])] * 3, [opened(1, 1, [1] * 4096)]
    targets = [Target(server.port) for _ in frames]
    for target, frame in zip(targets, frames, strict=True):
        target.send(*frame)
        target.send(*frame)
    until(lambda: len(taken) == 5)
    for target in targets:
        target.close()
    assert server.stop(0.0).wait(HANG_S) and sorted(taken) == [1] + [3] * 4


def ended_with(port: int) -> tuple[grpc.StatusCode, str]:
    """How a stream ends that is let in to nothing."""
    target = Target(port)
    try:
        assert target.rest() == []
        return target.call.code(), target.call.details()
    finally:
        target.close()


def test_who_reads_no_answers_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("adaserve_jax.star.service.server.MAX_UNSENT_FRAMES", 8)
    most = 10**9
    quotas = Quotas(messages_per_s=most, messages_at_once=most)
    with toy_service(quotas=quotas, max_messages_per_s=most) as service, service.target("good") as good:
        with service.target("deaf") as deaf:
            asked = target_frame([draft(number, 1, 1, 0, [1]) for number in range(1, 2000)])  # each gets a Resync

            def is_gone() -> bool:
                deaf.send(asked)
                return service.core.targets == ["anybody/good"]

            until(is_gone)
            until(lambda: service.server.audit.streams == 1)
            assert service.server.audit.refused() == {"unread": 1}
        rounds(good, 1)


def test_who_does_not_read_why_it_is_refused_is_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("adaserve_jax.star.service.server.DRAIN_S", 0.05)
    with toy_service() as service, service.target("deaf") as deaf:
        asked = target_frame([draft(number, 1, 1, 0, [1]) for number in range(1, 2000)])
        for _ in range(20):
            deaf.send(asked)
        deaf.send(b"\xff junk")
        until(lambda: not service.server.audit.streams)


def test_no_more_streams_than_there_may_be():
    with toy_service(max_targets=2, max_streams_per_peer=2) as service, service.target("a"), service.target("b"):
        assert ended_with(service.port) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "2 targets are connected, as many as may be",
        )
    with toy_service(max_streams_per_peer=1) as service, service.target("a"):
        code, why = ended_with(service.port)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "1 connections of this peer are open" in why
        assert service.server.audit.refused() == {"streams": 1}
    until(lambda: not service.server.audit.streams)


def test_who_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("adaserve_jax.star.service.server.HELLO_TIMEOUT_S", 0.05)
    with toy_service() as service, service.target(None) as silent:
        assert silent.rest() == []
        until(lambda: not service.server.audit.streams)


def test_logs_tell_nothing_of_texts_and_secrets(caplog: pytest.LogCaptureFixture, tmp_path):
    secret, text = "0123456789abcdef-secret", [61, 62, 63, 64]
    file = tmp_path / "tokens"
    file.write_text(secret + "\n")
    with caplog.at_level(logging.DEBUG), toy_service(token_file=str(file)) as service:
        with service.target("a", token=secret) as target:
            target.send(opened(1, 1, text), draft(1, 1, 1, 4, [200], give_up_s=HANG_S))
            assert "200" not in (said := target.receive().message) and "61" not in said
        spoilt(service.port, b"junk")
        code, why = ended_with(service.port)
        assert code is grpc.StatusCode.UNAUTHENTICATED and secret not in why
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("adaserve"))
    assert secret not in ours and "61" not in ours and "62, 63" not in ours


def test_a_port_that_is_taken_is_said():
    class Nobody:
        def receive(self, stream, frame): ...
        def disconnect(self, stream): ...

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = DraftServiceSettings(listen=address)
        for begin in (check_free, lambda settings: DraftServer(settings, Nobody(), Caps())):
            with pytest.raises(ConfigError, match=f"cannot listen on {address}; choose another address with --listen"):
                begin(settings)


# ---- health ----


def test_health_is_answered_without_a_token_and_only_by_check(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("0123456789abcdef\n")
    with toy_service(token_file=str(file)) as service:
        assert health(service.port) == health(service.port, service=SERVICE) == HealthCheckResponse.SERVING
        assert health(service.port, service="other") is grpc.StatusCode.NOT_FOUND
        assert health(service.port, "Watch") is grpc.StatusCode.UNIMPLEMENTED
        service.server.shut()
        assert health(service.port) == HealthCheckResponse.NOT_SERVING


def test_a_health_check_that_asks_nothing_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("adaserve_jax.star.service.server.HEALTH_TIMEOUT_S", 1.0)
    never = threading.Event()

    def silent() -> Any:
        never.wait(HANG_S)
        yield b""

    with toy_service() as service, grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        check = channel.stream_unary("/grpc.health.v1.Health/Check")
        held = [check.future(silent()) for _ in range(HEALTH_CALLS_OF_ONE)]
        until(lambda: health(service.port) is grpc.StatusCode.RESOURCE_EXHAUSTED)
        with service.target("good") as good:
            rounds(good, 1)
        until(lambda: health(service.port) == HealthCheckResponse.SERVING)
        assert {call.code() for call in held} == {grpc.StatusCode.CANCELLED}
        never.set()


class Caller:
    """The context of a health check from this address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:5000"

    def abort(self, code: grpc.StatusCode, why: str) -> None:
        raise RuntimeError(f"{code.name}: {why}")

    def cancel(self) -> None: ...


def test_health_checks_that_ask_nothing_keep_no_other_address_from_its_own():
    go_on = threading.Event()
    with toy_service() as service:

        def check(number: int, asks: Any = ()) -> Any:
            caller: Any = Caller(f"192.0.2.{number}")
            return service.server.check_health(iter(asks), caller).status

        def hold(number: int) -> threading.Thread:
            running = threading.Event()

            def silent() -> Any:
                running.set()
                assert go_on.wait(HANG_S)
                yield from ()

            thread = threading.Thread(target=check, args=(number, silent()))
            thread.start()
            assert running.wait(HANG_S)
            return thread

        refused = "RESOURCE_EXHAUSTED: 4 health checks are running, or 2 of this address"
        held = [hold(0), hold(0)]
        with pytest.raises(RuntimeError, match=refused):
            check(0)
        assert check(1) == HealthCheckResponse.SERVING
        held += [hold(1), hold(2)]
        with pytest.raises(RuntimeError, match=refused):
            check(3)
        go_on.set()
        for thread in held:
            thread.join(HANG_S)
        assert check(0) == check(3) == HealthCheckResponse.SERVING
