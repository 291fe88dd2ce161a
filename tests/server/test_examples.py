"""Every example runs as it stands: the curl commands of the documents, the client in Python, the page in a browser's
language."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.models.chat_prompt import PLAIN_CHAT
from adaserve_jax.server.settings import ServerSettings
from tests.conftest import ROOT
from tests.docs.blocks import DOCUMENTS, SHELL, blocks
from tests.server.scripted import ByteTokenizer, ScriptedEngine

EXAMPLES = ROOT / "examples"
SHOWN_URL = "http://127.0.0.1:8000"
PAGE = (EXAMPLES / "chat.html").read_text()

FAKE_PAGE = """
const elements = {};
const make = () => ({
  value: "", textContent: "", className: "", style: {}, disabled: false, children: [], listeners: {},
  append(child) { this.children.push(child); }, addEventListener(name, act) { this.listeners[name] = act; },
  querySelectorAll(name) { return this.children.filter((c) => "." + c.className === name); }, remove() {},
});
globalThis.document = { getElementById: (id) => (elements[id] ??= make()), createElement: make };
document.getElementById("server").value = process.argv[2];
document.getElementById("most").value = "21";
"""
WAIT_FOR_WORDS = """
(async () => {
  while (!elements.told?.textContent) await new Promise((done) => setTimeout(done, 5));
  console.log(JSON.stringify(elements.told.textContent));
})();
"""
USE_OF_PAGE = """
(async () => {
  while (!elements.slo?.children.length) await new Promise((done) => setTimeout(done, 5));
  elements.slo.value = "interactive";
  await ask("hi ü");
  const first = { told: elements.told.textContent, width: elements.bar.style.width };
  elements.slo.value = "40";
  document.getElementById("text").value = "more";
  elements.form.listeners.submit({ preventDefault() {} });
  const stopped = { at_once: elements.stop.disabled, can_send: !elements.send.disabled };
  while (!elements.stop.disabled) await new Promise((done) => setTimeout(done, 5));
  stopped.can_send_after = !elements.send.disabled;
  elements.server.value += "/nowhere";
  await ask("lost");
  console.log(JSON.stringify({
    first, stopped, told: elements.told.textContent,
    lines: elements.log.children.map((c) => [c.className, c.textContent]),
    options: elements.slo.children.map((c) => [c.value, c.textContent]), messages: messages.length,
  }));
})();
"""

USE_OF_METER = """
(async () => {
  const meter = () => [elements.told.textContent, elements.bar.style.width];
  const seen = [];
  for (const most of ["21", "1", "0"]) {
    elements.most.value = most;
    elements.slo.value = "40";
    await ask("hi");
    seen.push(meter());
  }
  console.log(JSON.stringify(seen));
})();
"""
USE_OF_STOP = """
(async () => {
  const until = async (done) => { while (!done()) await new Promise((soon) => setTimeout(soon, 1)); };
  elements.most.value = "400";
  document.getElementById("slo").value = "40";
  const asked = ask("one");
  await until(() => elements.log.children[1].textContent);
  elements.stop.listeners.click();
  await asked;
  elements.most.value = "3";
  await ask("two");
  console.log(JSON.stringify(elements.log.children.map((line) => line.textContent)));
})();
"""


def curl_commands() -> list[str]:
    """The commands of the documents' shell blocks that begin with curl: to the next command, comment or empty line."""
    shown = [block for path in DOCUMENTS for block in blocks(path, *SHELL)]
    found = [one for block in shown for one in re.findall(r"^curl .*?(?=\n(?:curl |#|\n)|\n\Z)", block, re.M | re.S)]
    return [command for command in found if SHOWN_URL in command]


@pytest.fixture(scope="module")
def keyed(serve_engine, tmp_path_factory):
    adapters = tmp_path_factory.mktemp("adapters")
    for name in ("sql", "support"):
        (adapters / name).mkdir()
        (adapters / name / "adapter_config.json").write_text("{}")
    lora = (f"sql={adapters / 'sql'}",)
    engine = ScriptedEngine(
        EngineConfig(target="models/scripted", draft="demo", drafts=("code=models/code",), lora=lora, max_loras=4)
    )
    engine.start()
    settings = ServerSettings(api_key="secret", served_model_name="demo", lora_folder=str(adapters))
    with serve_engine(engine, ByteTokenizer(), settings) as made:
        yield made
    engine.close()


@pytest.mark.parametrize("command", curl_commands(), ids=lambda command: re.sub(r"\W+", " ", command)[-50:])
def test_the_curl_commands_of_the_documents(keyed, command):
    """Against a server with the embedded pair's name, a draft called code, an adapter called sql, and a key, which
    every command may carry."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    wrapped = 'curl() { command curl -sS --fail-with-body -H "Authorization: Bearer secret" "$@"; }\n'
    done = subprocess.run(
        ["sh", "-c", wrapped + command.replace(SHOWN_URL, keyed.url)], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_there_are_commands_for_every_way_to_ask():
    commands = "\n".join(curl_commands())
    for part in ("/v1/completions", "/v1/chat/completions", '"stream"', "slo_tpot_ms", "json_schema", "logprobs",
                 "/tokenize", "/v1/models", "slo_class"):  # fmt: skip
        assert part in commands, part


def test_the_client_of_every_class(server, monkeypatch, capsys):
    script = str(EXAMPLES / "mixed_slo_client.py")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.argv", [script, "--base-url", f"{server.url}/v1", "--requests", "4", "--max-tokens", "30"])
    runpy.run_path(script, run_name="__main__")
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert set(rows) == {"default", "interactive", "chat", "batch"}, "all that the server tells of"
    cells = {name: [cell.strip() for cell in line.split("│")[2:-1]] for name, line in rows.items()}
    assert [cells[name][1] for name in ("interactive", "chat", "batch")] == ["50", "100", "none"]
    assert all(cell[0] == "4" and float(cell[2]) > 0 and float(cell[3]) > 0 for cell in cells.values())
    assert cells["batch"][4] == "-" and cells["chat"][4].endswith("%")
    sent = server.engine.submitted[-16:]
    assert sorted(request.slo_class for request in sent) == sorted(["default", "interactive", "chat", "batch"] * 4)


def test_the_client_shows_no_time_where_one_event_brought_all(server, monkeypatch, capsys):
    script = str(EXAMPLES / "mixed_slo_client.py")
    monkeypatch.setattr("sys.argv", [script, "--base-url", f"{server.url}/v1", "--requests", "1", "--max-tokens", "3"])
    runpy.run_path(script, run_name="__main__")
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[4].strip() for row in rows] == ["-"] * 4


def test_the_client_counts_the_tokens_after_the_first_event(monkeypatch):
    def event(tokens: int, *choices: str) -> SimpleNamespace:
        usage = SimpleNamespace(completion_tokens=tokens)
        texts = [SimpleNamespace(text=text) for text in choices]
        return SimpleNamespace(choices=texts, usage=usage, metrics={"slo": {}})

    async def create(**_: Any) -> AsyncIterator[SimpleNamespace]:
        async def events() -> AsyncIterator[SimpleNamespace]:
            for one in (event(3, "abc"), event(5, "de"), event(5)):
                yield one

        return events()

    ask = runpy.run_path(str(EXAMPLES / "mixed_slo_client.py"))["ask"]
    monkeypatch.setattr("time.perf_counter", iter([1.0, 1.1]).__next__)
    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    assert asyncio.run(ask(client, "demo", "batch", "hi", 5)).tpot_ms == pytest.approx(50)


def test_the_page_loads_nothing_from_elsewhere():
    assert set(re.findall(r"https?://[^\s\"'`<]+", PAGE)) == {SHOWN_URL}
    assert not re.search(r"\b(?:src|href)=|@import|url\(|import\s*\(", PAGE)
    assert "innerHTML" not in PAGE, "what a model says is text, never markup"


class SlowChat(ByteTokenizer):
    def apply_chat_template(self, messages, prompt=PLAIN_CHAT) -> list[int]:
        return self.encode("slow ") + super().apply_chat_template(messages, prompt)


def seen_on_page(use: str, url: str, folder: Path) -> Any:
    """Run the page's own script in node, on elements that only remember what was put into them."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (script,) = re.findall(r"<script>(.*)</script>", PAGE, re.DOTALL)
    path = folder / "page.js"
    path.write_text(FAKE_PAGE + script + use)
    done = subprocess.run([node, path, url], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_says_what_the_server_says(keyed, tmp_path):
    said = seen_on_page(WAIT_FOR_WORDS, keyed.url, tmp_path)
    assert said.startswith("the classes of the server are unknown: ") and "API key" in said


def test_the_page_streams_and_measures(server, tmp_path):
    seen = seen_on_page(USE_OF_PAGE, f"{server.url}/", tmp_path)
    prompt = "user: hi ü\nassistant:"
    answer = (prompt.encode() * 2)[:21].decode(errors="replace")
    assert seen["lines"][:3] == [["user", "hi ü"], ["assistant", answer], ["user", "more"]]
    assert re.fullmatch(r"\d+\.\d ms per token of 50\.0, (met|missed)", seen["first"]["told"])
    assert seen["first"]["width"].endswith("%")
    assert ["interactive", "interactive: 50 ms per token"] in seen["options"]
    assert ["batch", "batch: no target"] in seen["options"]
    second = server.engine.submitted[-1]
    assert second.slo.tpot_ms == 40
    assert seen["stopped"] == {"at_once": False, "can_send": False, "can_send_after": True}
    assert bytes(second.prompt_ids).decode().startswith(f"user: hi ü\nassistant: {answer}\nuser: more\n")
    assert seen["lines"][-1][0] == "assistant" and "no such route" in seen["lines"][-1][1]
    assert seen["messages"] == 4, "what failed is not part of the conversation"


def test_the_meter_of_the_page_is_of_the_last_request(server, tmp_path):
    several, one, refused = seen_on_page(USE_OF_METER, server.url, tmp_path)
    assert re.fullmatch(r"\d+\.\d ms per token of 40\.0, (met|missed)", several[0])
    assert one == ["one token, no time per token, met", "0%"]
    assert refused == ["", "0"]


def test_what_is_stopped_stays_in_the_conversation(start_server, tmp_path):
    with start_server(tokenizer=SlowChat()) as server:
        lines = seen_on_page(USE_OF_STOP, server.url, tmp_path)
        asked = bytes(server.engine.submitted[-1].prompt_ids).decode()
    shown, mark = lines[1].split("\n[")
    assert shown and mark == "stopped]"
    assert asked == f"slow user: one\nassistant: {shown}\nuser: two\nassistant:"
