"""The scripts that measure other servers: the commands they build, what they say when a peer is missing, and one run of
a stand-in through the real client."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.models.config import DEMO_FOLDER
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.schema import ALL_CLASSES
from tests.bench.scripts import FOLDER, modules_of
from tests.waiting import is_alive

PEERS = FOLDER / "peers"
STAND_IN = Path(__file__).with_name("stand_in_peer.py")
NEW_HELP = (
    "--spec-draft-n-max N   number of tokens to draft\n--draft, --draft-n, --draft-max N  the argument has been removed"
)
OLD_HELP = "--draft, --draft-n, --draft-max N   number of tokens to draft"


scripts = modules_of(
    "peers.common",
    "peers.llama_cpp",
    "peers.vllm",
    "peers.transformers_serve",
    "peers.adaserve",
    "peers.assisted_server",
)


def options(scripts, *given: str, **more):
    made = scripts["common"].parser("what it is", **more)
    return scripts["common"].parse(made, [*given, "--out", "o"])[0]


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize(
    ("known", "drafting"),
    [
        (NEW_HELP, "--spec-type draft-simple --spec-draft-n-max 3"),
        (OLD_HELP, "--draft-max 3 --draft-min 0"),
    ],
)
def test_llama_cpp_shares_its_context_out_and_drafts_by_either_spelling(scripts, known: str, drafting: str):
    given = options(
        scripts, *words("--target m/t.gguf --draft d.gguf --draft-tokens 3 --max-requests 4 --max-context 512")
    )
    expected = (
        "S --model m/t.gguf --alias t --host 127.0.0.1 --ctx-size 2048 --parallel 4 --temp 1 --top-k 0 --top-p 1 "
        f"--min-p 0 --no-cache-prompt --model-draft d.gguf {drafting}"
    )
    assert scripts["llama_cpp"].command("S", given, known) == words(expected)


def test_llama_cpp_without_a_draft_and_with_more_options(scripts):
    given = options(scripts, "--target", "t.gguf", "--no-draft", "--prefix-cache", "--server-args", "-ngl 99 -a 'a b'")
    built = scripts["llama_cpp"].command("S", given, NEW_HELP)
    assert not [word for word in built if "draft" in word] and "--no-cache-prompt" not in built
    assert built[-4:] == ["-ngl", "99", "-a", "a b"]


def test_vllm_gets_the_draft_as_one_json_object(scripts):
    given = options(scripts, "--target", "org/Big-1B", "--draft", "demo", "--draft-tokens", "5", "--max-requests", "8")
    built = scripts["vllm"].command("V", given)
    expected = (
        "V serve org/Big-1B --served-model-name Big-1B --host 127.0.0.1 --max-model-len 2048 --max-num-seqs 8 "
        "--generation-config vllm --no-enable-prefix-caching --speculative-config"
    )
    assert built[:-1] == words(expected)
    assert json.loads(built[-1]) == {
        "method": "draft_model",
        "model": str(DEMO_FOLDER / "draft"),
        "num_speculative_tokens": 5,
    }
    plain = scripts["vllm"].command("V", options(scripts, "--target", "t", "--no-draft", "--prefix-cache"))
    assert plain[-1] == "--enable-prefix-caching"


def test_this_package_is_served_with_a_policy_or_without_a_draft(scripts):
    made = ("--target", "demo", "--max-requests", "8")
    for draft, tail in ((("--draft", "demo"), "spec:4 --draft demo"), (("--no-draft",), "ar --draft none")):
        given = options(scripts, *made, *draft)
        given.policy = "spec:4"
        built = scripts["adaserve"].command(given)
        assert built[0] == sys.executable
        assert built[1:] == words(
            f"-m adaserve_jax.cli serve --host 127.0.0.1 --target demo --policy {tail} --max-requests 8 "
            "--max-context 2048 --no-prefix-cache"
        )


def test_transformers_serves_plainly_or_behind_the_assisted_server(scripts, monkeypatch):
    script = scripts["transformers_serve"]
    monkeypatch.setattr(scripts["common"], "program", lambda name, how: name)
    given = options(scripts, "--target", "demo", "--draft", "demo")
    given.dtype, given.continuous_batching = "float32", True
    target, draft = DEMO_FOLDER / "target", DEMO_FOLDER / "draft"
    server = PEERS / "assisted_server.py"
    assert script.command(given) == [
        sys.executable, *words(f"{server} {target} {draft} --name demo --dtype float32 --draft-tokens 4")
    ]  # fmt: skip
    given.no_draft = True
    plain = f"transformers serve {target} --host 127.0.0.1 --dtype float32"
    assert script.command(given) == words(f"{plain} --continuous-batching")
    given.continuous_batching = False
    assert script.command(given) == words(plain)


def test_transformers_serve_is_told_to_sample_and_keeps_the_models_stops(scripts):
    body = scripts["transformers_serve"].extra_body(str(DEMO_FOLDER / "target"))
    held = json.loads((DEMO_FOLDER / "target" / "generation_config.json").read_text())
    assert json.loads(body["generation_config"]) == held | {"do_sample": True, "top_k": 0, "top_p": 1.0}
    assert held["eos_token_id"] == 0


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        (
            "llama_cpp",
            ("--target", "t", "--no-draft"),
            "llama-server is not installed, or not on PATH; install it with: brew",
        ),
        ("vllm", (), "vllm is not installed, or not on PATH; install it with: pip install vllm"),
    ],
)
def test_a_missing_peer_is_named_with_the_command_that_installs_it(
    scripts, name, given, told, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit) as ended:
        scripts[name].main([*given, "--out", str(tmp_path / "o")])
    assert ended.value.code == 2
    assert f"error: {told}" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_missing_python_package_is_named(scripts, monkeypatch, tmp_path, capsys):
    script = scripts["transformers_serve"]
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(SystemExit):
        script.main(["--no-draft", "--out", str(tmp_path / "o")])
    assert (
        'accelerate is not installed; install it with: pip install "transformers[serving]"' in capsys.readouterr().err
    )


def test_what_is_no_gguf_file_is_refused_with_the_conversion(scripts, tmp_path, capsys):
    (tmp_path / "wrong.gguf").write_bytes(b"PK\x03\x04")
    (tmp_path / "right.gguf").write_bytes(b"GGUF\x03\x00")
    check = scripts["llama_cpp"].check_gguf
    check(str(tmp_path / "right.gguf"))
    for path, told in (
        (tmp_path, f"python convert_hf_to_gguf.py {tmp_path} --outfile {tmp_path.name}.gguf"),
        (tmp_path / "wrong.gguf", "must be a GGUF file, which begins with GGUF, got b'PK"),
        (tmp_path / "none.gguf", "No such file or directory; give the path of a GGUF file"),
    ):
        with pytest.raises(SystemExit):
            check(str(path))
        assert told in capsys.readouterr().err


def test_the_bench_is_given_what_the_peer_needs(scripts):
    common = scripts["common"]
    peer = common.Peer("P", ("p",), "/health", "draft:4", model="m", extra_body={"timings_per_token": True})
    built = common.bench_command(peer, "http://127.0.0.1:5", Path("o"), ["--rates", "1,2"])
    assert built[0] == sys.executable
    assert built[1:] == [
        *words("-m adaserve_jax.cli bench --url http://127.0.0.1:5 --system P --policies draft:4 --out o --resume"),
        *("--model", "m", "--extra-body", '{"timings_per_token": true}', "--rates", "1,2"),
    ]


def test_an_installed_llama_cpp_is_asked_for_its_help_and_version_and_counted_exactly(scripts, monkeypatch, tmp_path):
    program = tmp_path / "llama-server"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "version: 7 (abc)" || echo "--spec-draft-n-max N"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ("t.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    seen = []
    monkeypatch.setattr(scripts["common"], "measure", lambda *given: seen.append(given) or 0)
    given = [
        "--target",
        str(tmp_path / "t.gguf"),
        "--draft",
        str(tmp_path / "d.gguf"),
        "--out",
        "o",
        "--",
        "--rates",
        "1",
    ]
    assert scripts["llama_cpp"].main(given) == 0
    ((peer, out, bench),) = seen
    assert (peer.system, peer.version, peer.ready) == ("llama.cpp", "version: 7 (abc)", "/health")
    assert peer.command[0] == str(program) and "--spec-draft-n-max" in peer.command
    assert peer.extra_body == {"timings_per_token": True} and (out, bench) == (Path("o"), ["--rates", "1"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--", "--url", "x"), "--url of `adaserve bench` is given by this script"),
        (("--", "--out=x"), "--out=x of `adaserve bench` is given by this script"),
        (("--draft-tokens", "0"), "--draft-tokens must be at least 1, got 0"),
        (("--draft", "d", "--no-draft"), "not allowed with argument"),
        (("--targets-of", "nowhere"), "--targets-of must be the folder of a measured run"),
    ],
)
def test_wrong_options_end_before_anything_is_started(scripts, given, told, capsys):
    made = scripts["common"].parser("what it is", target="demo", draft="demo")
    with pytest.raises(SystemExit) as ended:
        scripts["common"].parse(made, ["--out", "o", *given])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_server_that_ends_at_once_is_shown_with_its_last_lines(scripts, tmp_path, capsys):
    command = (sys.executable, "-c", "import sys; print('no such model'); sys.exit(7)")
    with pytest.raises(SystemExit):
        scripts["common"].measure(scripts["common"].Peer("x", command, "/health", "plain"), tmp_path / "o", [])
    told = capsys.readouterr().err
    assert "the server ended with status 7 before it was ready" in told and "no such model" in told


def test_a_server_that_never_gets_ready_is_ended_with_what_it_started(scripts, tmp_path):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    common = scripts["common"]
    log = tmp_path / "log"
    with pytest.raises(SystemExit), common.running([sys.executable, "-c", code], log) as server:
        common.wait_ready(server, f"http://127.0.0.1:{common.free_port()}/health", log, limit_s=0.5)
    assert server.returncode is not None
    child = int(log.read_text().splitlines()[-1])
    end = time.monotonic() + 10.0
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_alive(child)


@pytest.mark.slow
def test_a_stand_in_is_measured_by_the_real_client_and_the_run_goes_on_at_its_port(
    scripts, tmp_path, monkeypatch, capfd
):
    common, out = scripts["common"], tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    workload = tmp_path / "w.jsonl"
    line = {"prompt": "abc", "max_tokens": 7, "slo_class": "c", "slo_relative": 50.0, "temperature": 0.0}
    workload.write_text(f"{json.dumps(line)}\n" * 3)
    peer = common.Peer("stand-in", (sys.executable, str(STAND_IN), str(PEERS)), "/health", "draft:2", "1.0")
    bench = ["--workload", str(workload), "--rates", "8", "--duration", "0.5", "--warmup-requests", "1"]
    bench += ["--max-late-ms", "5000", "--baseline-ms", "20"]
    assert common.measure(peer, out, bench) == 0
    folder = RunResults.load(out)
    (row,) = [row for row in folder.rows if row.slo_class == ALL_CLASSES]
    assert (row.system, row.policy, row.target, row.token_source) == ("stand-in", "draft:2", "stand-in", "usage")
    assert row.requests == row.finished > 0 and row.output_tokens == 7 * row.requests
    assert row.prompt_tokens == 3 * row.requests and row.baseline_s == 0.02 and row.attainment == 1.0
    assert common.baseline_ms(out) == 20.0
    assert common.measure(peer, out, bench) == 0
    assert RunResults.load(out).rows == folder.rows
    held = json.loads((out / common.SERVER).read_text())
    assert held["command"] == [*peer.command, "--port", str(held["port"])] and held["version"] == "1.0"
    assert common.port_for(out) == held["port"] and "adaserve report" in capfd.readouterr().err
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((common.HOST, held["port"]))
        taken.listen()
        with pytest.raises(SystemExit):
            common.measure(peer, out, bench)
    assert f"had port {held['port']}, which is taken" in capfd.readouterr().err


def test_events_hold_whole_characters_and_the_count_so_far(scripts):
    """The bytes of "é" come in two verifications."""
    sent: list[tuple[str, int]] = []
    streamer = scripts["assisted_server"].Streamer(
        lambda tokens: bytes(tokens).decode(errors="replace"), lambda text, count: sent.append((text, count))
    )

    for tokens in ([1, 2, 3], [97, 0xC3], [0xA9], [98, 99]):
        streamer.put(np.array([tokens]))
    assert sent == [("", 2), ("aé", 3), ("bc", 5)]


@pytest.mark.slow
@pytest.mark.torch
def test_assisted_generation_sends_what_plain_generation_has(scripts):
    torch = pytest.importorskip("torch", reason="TRANSFORMERS NOT COMPARED: torch is not installed")
    target, draft = (str(DEMO_FOLDER / role) for role in ("target", "draft"))
    generator = scripts["assisted_server"].Generator(target, draft, dtype="float32", device="cpu", draft_tokens=4)
    prompt = generator.encode({"prompt": "def add_all(values):\n    total = 0\n    for value in values:\n"})
    ids = torch.tensor([prompt])
    plain = generator._target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    sent: list[tuple[str, int]] = []
    streamer = scripts["assisted_server"].Streamer(
        lambda tokens: generator.tokenizer.decode(tokens, skip_special_tokens=True),
        lambda text, count: sent.append((text, count)),
    )
    generator.generate(prompt, {"max_tokens": 24, "temperature": 0.0}, streamer)
    assert "".join(text for text, _ in sent) == generator.tokenizer.decode(plain[0, len(prompt) :])
    assert sent[-1][1] == streamer.count == 24 and len(sent) < 24  # so some verification brought several
