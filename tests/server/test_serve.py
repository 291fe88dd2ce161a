"""The whole front end as a program: port at once, progress, ready, drain on SIGTERM, errors of loading, no jax."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError, EngineDeadError
from adaserve_jax.server.connection import ABORT_GRACE_S
from adaserve_jax.server.serve import WarmUpBar, example, listen, load_tokenizer, serve
from adaserve_jax.server.settings import ServerSettings
from tests.server.scripted import ByteTokenizer, ScriptedEngine
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import sys
from rich.console import Console
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.server.serve import serve
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.serve import WarmUpBar
from tests.waiting import wait_until
from tests.server.scripted import ByteTokenizer
bar = WarmUpBar(Console(stderr=True))
config = EngineConfig(target=sys.argv[1], policy="process")
engine = ProcessEngine(config, bar.update, factory="tests.server.scripted:ScriptedEngine")
settings = ServerSettings(port=int(sys.argv[2]), shutdown_timeout=float(sys.argv[3]), exit_when_dead=len(sys.argv) > 4)
status = serve(settings, engine, ByteTokenizer, bar)
assert "jax" not in sys.modules, "the front end imported jax"
sys.exit(status)
"""


class Program:
    def __init__(self, target: str = "scripted", timeout: float = 10.0, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-c", PROGRAM, target, str(self.port), str(timeout), *options]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.http = self.client()

    def client(self, connections: int = 10) -> httpx.Client:
        limits = httpx.Limits(max_connections=connections + 1)
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S, limits=limits)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_) -> None:
        self.http.close()
        self.process.kill()
        self.process.communicate()

    def status(self, path: str) -> int | None:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return None

    def end(self, seconds: float = PATIENCE_S) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


def test_it_starts_serves_and_drains():
    with Program() as program:
        wait_until(lambda: program.status("/ready") == 200, every_s=0.02)
        request = program.http.build_request(
            "POST", "/v1/completions", json={"prompt": "slow", "max_tokens": 30, "stream": True}
        )
        streaming = program.http.send(request, stream=True)
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: program.status("/ready") == 503, every_s=0.02)
        refused = program.http.post("/v1/completions", json={"prompt": "x"})
        assert refused.json()["error"]["code"] == "shutting_down"
        text = streaming.read().decode()
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        code, out, err = program.end()
    assert code == 0, err
    first, second = out.strip().splitlines()
    assert first.startswith(f"adaserve serves scripted on http://127.0.0.1:{program.port}")
    assert "slo_tpot_ms" in second and second.startswith("curl http://")
    *progress, stopping = err.splitlines()
    assert progress == ["programs 1/3", "programs 2/3", "programs 3/3"]
    assert "nothing new is taken; requests in flight have 10 s to end, a second signal ends them" in stopping


@pytest.mark.slow
def test_a_drain_that_takes_too_long_ends_the_requests():
    with Program(timeout=0.2) as program:
        wait_until(lambda: program.status("/ready") == 200, every_s=0.02)
        request = program.http.build_request(
            "POST", "/v1/completions", json={"prompt": "slow", "max_tokens": 500, "stream": True}
        )
        streaming = program.http.send(request, stream=True)
        program.process.send_signal(signal.SIGINT)
        assert '"code": "aborted"' in streaming.read().decode()
        code, _, err = program.end()
    assert code == 0, err


@pytest.mark.slow
def test_a_second_signal_ends_the_requests_with_an_error():
    with Program(timeout=600.0) as program:
        wait_until(lambda: program.status("/ready") == 200, every_s=0.02)
        slow = {"prompt": "slow", "max_tokens": 500}
        request = program.http.build_request("POST", "/v1/completions", json=slow | {"stream": True})
        streaming = program.http.send(request, stream=True)
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(program.http.post("/v1/completions", json=slow)))
        waiting.start()
        wait_until(lambda: "adaserve_requests_running 2" in program.http.get("/metrics").text, every_s=0.02)
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: program.status("/ready") == 503, every_s=0.02)
        program.process.send_signal(signal.SIGTERM)
        assert '"code": "aborted"' in streaming.read().decode()
        waiting.join()
        code, _, err = program.end()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "aborted"
    assert code == 0, err


def read_slowly(program: Program, seconds: float) -> bytes:
    """An answer of about 7 MB to a client that takes none of it until `seconds` after the server was told to stop."""
    body = json.dumps({"prompt": "a" * 1_000_000, "return_token_strs": True}).encode()
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", program.port))
        connection.sendall(head.encode() + body)
        answer = connection.recv(1)
        program.process.send_signal(signal.SIGTERM)
        time.sleep(seconds)
        connection.settimeout(10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**20):
                answer += part
    return answer


@pytest.mark.slow
def test_a_client_that_pauses_reading_gets_all_of_its_answer():
    with Program("long") as program:
        wait_until(lambda: program.status("/ready") == 200, every_s=0.02)
        answer = read_slowly(program, ABORT_GRACE_S + 1.0)
        _, _, content = answer.partition(b"\r\n\r\n")
        assert json.loads(content)["count"] == 1_000_000 and len(content) > 6e6
        code, _, err = program.end()
    assert code == 0, err


@pytest.mark.slow
def test_a_client_that_never_reads_holds_up_no_stop():
    with Program("long", timeout=0.2) as program:
        wait_until(lambda: program.status("/ready") == 200, every_s=0.02)
        answer = read_slowly(program, 4.0)
        assert answer.startswith(b"HTTP/1.1 200") and len(answer) < 6e6
        code, _, err = program.end()
    assert code == 0, err


def test_a_server_can_end_with_its_engine(caplog):
    engine, status = ScriptedEngine(EngineConfig(target="models/scripted")), []
    settings = ServerSettings(port=0, exit_when_dead=True)
    bar = WarmUpBar(Console(file=io.StringIO()))
    serving = threading.Thread(target=lambda: status.append(serve(settings, engine, ByteTokenizer, bar)), daemon=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        serving.start()
        wait_until(lambda: "curl" in said.getvalue() or not serving.is_alive(), every_s=0.02)
    (url,) = re.findall(r"^adaserve serves scripted on (http://127\.0\.0\.1:\d+) ", said.getvalue())
    lost = httpx.post(f"{url}/v1/completions", json={"prompt": "die"}, timeout=PATIENCE_S)
    assert lost.json()["error"]["code"] == "engine_dead"
    serving.join(PATIENCE_S)
    assert not serving.is_alive()
    assert status == [70] and "the server ends too" in caplog.text


class Hung(ScriptedEngine):
    """Loads no adapter until the test lets it."""

    loads = may_load = False

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        self.loads = True
        wait_until(lambda: self.may_load)
        raise EngineDeadError("the engine was closed")


def test_an_adapter_that_an_engine_never_loads_holds_up_no_stop(tmp_path):
    (tmp_path / "a").mkdir()
    engine = Hung(EngineConfig(target="models/scripted"))
    settings = ServerSettings(port=0, exit_when_dead=True, shutdown_timeout=0.1, lora_folder=str(tmp_path))
    bar = WarmUpBar(Console(file=io.StringIO()))
    serving = threading.Thread(target=serve, args=(settings, engine, ByteTokenizer, bar), daemon=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        serving.start()
        wait_until(lambda: "curl" in said.getvalue() or not serving.is_alive(), every_s=0.02)
    (url,) = re.findall(r"^adaserve serves scripted on (http://127\.0\.0\.1:\d+) ", said.getvalue())

    def load() -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"}, timeout=PATIENCE_S)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    wait_until(lambda: engine.loads, every_s=0.02)
    httpx.post(f"{url}/v1/completions", json={"prompt": "die"}, timeout=PATIENCE_S)
    serving.join(20 * ABORT_GRACE_S)
    ended, engine.may_load = not serving.is_alive(), True
    serving.join(PATIENCE_S)
    loading.join(PATIENCE_S)
    assert ended


def test_it_answers_while_the_engine_starts_and_can_be_stopped_then():
    with Program("hang") as program:
        wait_until(lambda: program.status("/health") == 200, every_s=0.02)
        assert program.status("/ready") == 503
        program.process.send_signal(signal.SIGTERM)
        code, out, err = program.end()
    assert code == 0, err
    assert out == ""


@pytest.mark.slow
def test_an_engine_that_cannot_load_ends_the_program_with_its_error():
    with Program("missing") as program:
        code, out, err = program.end()
    assert code == 1 and out == ""
    assert "CheckpointError: expected model.safetensors in missing, found nothing" in err


def test_a_taken_port_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: .*choose another with --port"):
            listen(ServerSettings(port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_told(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host} port 0: .*choose another with --host"):
        listen(ServerSettings(host=host, port=0))


def test_the_example_is_one_shell_command(server):
    command = example("http://h:1", server.state)
    assert re.fullmatch(r"curl http://h:1/v1/completions -H 'Content-Type: application/json' -d '\{.*\}'", command)
    assert '"slo_tpot_ms": 40}' in command, "four times the baseline"


def test_the_example_quotes_the_key(start_server):
    with start_server(ServerSettings(api_key="two words")) as server:
        command = example("http://h:1", server.state).replace("curl", "printf '%s\n'", 1)
    lines = subprocess.check_output(
        ["sh", "-c", command], env={"ADASERVE_API_KEY": "two words"}, text=True
    ).splitlines()
    assert lines[1:5] == ["-H", "Authorization: Bearer two words", "-H", "Content-Type: application/json"]


def test_a_target_that_is_no_folder_is_refused_before_the_engine_starts(tmp_path):
    with pytest.raises(CheckpointError, match=r"target checkpoint '.*nowhere': expected a folder at .*, found nothing"):
        load_tokenizer(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("terminal", [False, True])
def test_the_progress_of_warm_up_is_shown(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    bar = WarmUpBar(console)
    for done in range(101):
        bar.update("compiling", done, 100)
    bar.close()
    bar.update("too late", 1, 2)
    text = console.file.getvalue()
    assert "compiling" in text and "100/100" in text and "too late" not in text
    assert terminal or len(text.splitlines()) == 11


def test_small_writes_leave_at_once():
    async def nodelay() -> int:
        accepted = asyncio.get_running_loop().create_future()

        def on_connect(_, writer) -> None:
            accepted.set_result(writer)

        listener = listen(ServerSettings(port=0))
        async with await asyncio.start_server(on_connect, sock=listener) as server:
            _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer = await accepted
            value = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for one in (client, writer):
                one.close()
                await one.wait_closed()
        return value

    assert asyncio.run(nodelay()) == 1
