"""A remote drafter over gRPC, against the draft service itself with a toy for its device, and against what is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.client.channel import GrpcTransport
from adaserve_jax.star.client.drafter import RemoteDrafter
from adaserve_jax.star.messages import SessionSampling
from adaserve_jax.star.wire import METHOD
from adaserve_jax.tree.acceptance_table import ChanceTable
from tests.star.scripted import Row, plan_of
from tests.star.streams import HANG_S, toy_service
from tests.star.test_security import files  # noqa: F401
from tests.star.toys import VOCABULARY, hello, toy_columns

TABLE = ChanceTable(np.full((2, 1, 1, 11), 0.5, np.float32), np.tile(np.arange(10, dtype=np.float32), (2, 1)))


@contextmanager
def drafter(*ports: int, **options: Any) -> Iterator[RemoteDrafter]:
    """One that waits as long as it takes."""
    config = DrafterConfig(tuple(f"grpc://127.0.0.1:{port}" for port in ports), HANG_S * 1e3, **options)
    transports = [GrpcTransport(address, config) for address in config.addresses]
    made = RemoteDrafter(transports, config, hello=hello(), table=TABLE, max_rows=8, vocabulary=VOCABULARY)
    try:
        yield made
    finally:
        made.close()


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def check_round(drafts: RemoteDrafter, rows: list[Row], depth: int = 3, width: int = 2) -> None:
    """Every row gets the tree of its text."""
    found = drafts.propose(plan_of(rows, depth, width))
    assert found.log_f.shape == (len(rows), depth * width)
    for at, row in enumerate(rows):
        sampling = SessionSampling(row.seed, 0, float(np.float32(row.temperature)), 0, 1.0, 0.0)
        columns = np.flatnonzero(found.log_f[at] > -np.inf)
        expected = toy_columns(row.text, sampling, depth, width, True)
        assert found.cell is not None and found.log_q is not None
        parts = (found.token, found.parent, found.cell, found.log_q)
        assert (columns.tolist(), *(part[at, columns].tolist() for part in parts)) == expected


def reason(drafts: RemoteDrafter) -> str:
    return next(iter(drafts.stats().services.values())).reason


def test_rounds_over_a_socket() -> None:
    with toy_service() as service, drafter(service.port) as drafts:
        welcome = drafts.connect(HANG_S)
        assert welcome is not None and welcome.max_context == 64
        rows = [Row(slot, text(20, slot), seed=slot, temperature=slot / 4) for slot in range(6)]
        check_round(drafts, rows)
        for length in (1, 3):
            rows = [
                Row(row.slot, [*row.text, *text(length, 9)], len(row.text), seed=row.seed, temperature=row.temperature)
                for row in rows
            ]
            check_round(drafts, rows, depth=length, width=3)
        assert service.core.num_sessions == 6 and drafts.stats().trees == 18
        drafts.ended(np.arange(4, dtype=np.int32))
        check_round(drafts, [Row(7, text(9))])
        assert service.core.num_sessions == 3
        drafts.close()
        while service.core.num_sessions:
            threading.Event().wait(0.002)


def test_a_service_that_stops_is_lost_and_found_again_at_its_address() -> None:
    with toy_service() as service:
        port = service.port
        drafts_of = drafter(port)
        drafts = drafts_of.__enter__()
        assert drafts.connect(HANG_S) is not None
        check_round(drafts, [Row(0, text(9))])
    while not reason(drafts):
        threading.Event().wait(0.002)
    found = drafts.propose(plan_of([Row(0, [*text(9), 1], 9)]))
    assert not found.log_f.size
    with toy_service(listen=f"127.0.0.1:{port}"):
        assert drafts.connect(HANG_S) is not None
        check_round(drafts, [Row(0, [*text(9), 1, 2], 10)])
        drafts_of.__exit__(None, None, None)


def test_only_the_right_token_gets_in_and_it_is_read_anew_each_time(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.write_text("a-secret-of-some-length-0123456789\n")
    mine.write_text("another-one-of-some-length-0123456\n")
    theirs.chmod(0o600)
    with toy_service(token_file=str(theirs)) as service:
        with drafter(service.port, drafter_token_file=str(mine)) as drafts:
            assert drafts.connect(HANG_S) is None
            assert reason(drafts).startswith("unauthenticated: ") and "another" not in reason(drafts)
        mine.write_text(theirs.read_text())
        with drafter(service.port, drafter_token_file=str(mine)) as drafts:
            assert drafts.connect(HANG_S) is not None
            check_round(drafts, [Row(0, text(9))])


def test_both_sides_show_certificates(files: Path) -> None:  # noqa: F811
    def named(**names: str) -> dict[str, str]:
        return {name: str(files / file) for name, file in names.items()}

    server = named(tls_cert="server.pem", tls_key="server.key", tls_client_ca="ca.pem")
    own = named(drafter_ca="ca.pem", drafter_cert="one.pem", drafter_key="one.key")
    with toy_service(**server) as service:
        with drafter(service.port, **own) as drafts:
            assert drafts.connect(HANG_S) is not None
            check_round(drafts, [Row(0, text(9))])
        for wrong in ({}, named(drafter_ca="ca.pem"), own | named(drafter_ca="stranger.pem")):
            with drafter(service.port, **wrong) as drafts:
                while not drafts.stats().lost:
                    assert drafts.connect(0.01) is None
                assert reason(drafts).startswith("UNAVAILABLE: ")


def test_files_that_cannot_be_read_are_told_at_once(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for name in ("drafter_ca", "drafter_token_file"):
        config = DrafterConfig(("grpc://a:1",), **{name: str(tmp_path / "absent")})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"^{name} must be a file that can be read, got .*absent: No such file"):
            GrpcTransport("a:1", config)
    with pytest.raises(
        ConfigError, match=r"^drafter_token_file must hold one line of printable ASCII, and .*empty does"
    ):
        GrpcTransport("a:1", DrafterConfig(("grpc://a:1",), drafter_token_file=str(empty)))


def test_certificates_that_are_none_are_told_at_once(files: Path) -> None:  # noqa: F811
    def transport(**names: str) -> GrpcTransport:
        paths = {name: str(files / file) for name, file in names.items()}
        return GrpcTransport("a:1", DrafterConfig(("grpc://a:1",), **paths))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"^drafter_ca must be a PEM file of certificates, got .*one\.key: "):
        transport(drafter_ca="one.key")
    with pytest.raises(
        ConfigError, match=r"^drafter_cert and drafter_key must be PEM files of a certificate and its own private key"
    ):
        transport(drafter_ca="ca.pem", drafter_cert="one.pem", drafter_key="server.key")
    transport(drafter_ca="ca.pem", drafter_cert="one.pem", drafter_key="one.key")


class _Says(grpc.GenericRpcHandler):
    """CandidateBuilder every stream with the same bytes, and ends it."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = frames

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: iter([next(requests) and f for f in self._frames])
        )


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ((b"\xff\xff\xff",), "a frame must be a protobuf ServiceFrame, got 3 bytes of other"),
        ((b"\x0a\x00",), "a message must be one of welcome, refused, tree, resync, load, got none of them"),
        ((), "the service ended the stream"),
    ],
)
def test_a_service_that_talks_nonsense_is_lost_with_the_reason(frames: tuple[bytes, ...], why: str) -> None:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[_Says(*frames)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with drafter(port) as drafts:
            while not drafts.stats().lost:
                assert drafts.connect(0.01) is None
            assert reason(drafts) == why
    finally:
        assert server.stop(0.0).wait(HANG_S)


def test_a_port_that_speaks_something_else_or_nothing_is_a_service_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def talk() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=talk, daemon=True).start()
        with drafter(port) as drafts:
            while not drafts.stats().lost:
                assert drafts.connect(0.01) is None
            assert reason(drafts).startswith("UNAVAILABLE: ")
    with drafter(port) as drafts:
        while not drafts.stats().lost:
            assert drafts.connect(0.01) is None
