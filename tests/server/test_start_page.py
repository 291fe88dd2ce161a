"""The start page: sealed by its policy, small, the same without a key, and its script at work against a real server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineInfo
from adaserve_jax.server.serve import example
from adaserve_jax.server.settings import ServerSettings
from tests.server.conftest import Running
from tests.server.scripted import ByteTokenizer, ScriptedEngine

FAKE_BROWSER = """
const elements = {};
const make = () => ({
  value: "", textContent: "", className: "", style: {}, disabled: false, children: [], listeners: {},
  replaceChildren(...children) { this.children = children; },
  addEventListener(name, act) { this.listeners[name] = act; },
});
let [, , server, key, prompt, other] = process.argv;
globalThis.document = {
  hidden: false, body: { dataset: key ? { keyed: "" } : {} },
  getElementById: (id) => (elements[id] ??= make()), createElement: make,
};
const realFetch = globalThis.fetch;
globalThis.fetch = (path, options) => realFetch(`${server}/${path}`, options);
document.getElementById("prompt").value = prompt;
document.getElementById("most").value = "12";
document.getElementById("bar");
const until = async (done) => { while (!done()) await new Promise((soon) => setTimeout(soon, 5)); };
const facts = () => elements.facts?.children.map((child) => child.textContent) ?? [];
"""
USE = """
(async () => {
  await until(() => facts().length);
  const before = facts();
  if (key) {
    elements.key.value = key;
    elements.key.listeners.change();
    await until(() => facts().length > before.length);
  }
  elements.form.listeners.submit({ preventDefault() {} });
  const busy = elements.send.disabled;
  await until(() => !elements.send.disabled);
  const { told, text, bar, target } = elements;
  const first = { told: told.textContent, text: text.textContent, width: bar.style.width };
  target.value = "";
  await ask().catch(() => {});
  console.log(JSON.stringify({
    before, facts: facts(), state: elements.state.textContent, busy, first, free: told.textContent,
  }));
  process.exit(0);
})();
"""
ONE_TOKEN = """
(async () => {
  elements.most.value = "1";
  await until(() => elements.target?.value);
  elements.bar.style.width = "50%";
  await ask();
  const ended = { told: elements.told.textContent, width: elements.bar.style.width };
  elements.prompt.value = "refuse this";
  elements.bar.style.width = "50%";
  await ask().catch(() => {});
  console.log(JSON.stringify({ ended, refused: elements.bar.style.width }));
  process.exit(0);
})();
"""
ANOTHER_SERVER = """
(async () => {
  const first = server;
  const model = () => facts()[1];
  await until(() => model() === "scripted");
  server = "http://127.0.0.1:1";
  await refresh();
  const gone = elements.state.textContent;
  server = other;
  await refresh();
  const after = model();
  document.hidden = true;
  await refresh();
  server = first;
  document.hidden = false;
  await refresh();
  console.log(JSON.stringify({ gone, after, looked_at_again: model() }));
  process.exit(0);
})();
"""


@pytest.fixture(scope="module")
def keyed(start_server) -> Iterator[Running]:
    with start_server(ServerSettings(api_key="sesame", dashboard=True)) as server:
        yield server


@pytest.fixture(scope="module")
def without_key(start_server) -> Iterator[Running]:
    with start_server(ServerSettings(dashboard=True)) as server:
        yield server


def inline(page: str, tag: str) -> str:
    (found,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return found


def test_its_policy_allows_its_own_script_and_style_and_nothing_else(server):
    page = server.http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        digest = hashlib.sha256(inline(page.text, tag).encode()).digest()
        assert policy.pop(name) == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert policy.pop("connect-src") == "'self'" and policy.pop("img-src") == "data:"
    assert policy.keys() == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(policy.values()) == {"'none'"}


def test_it_is_small_and_says_as_text_what_the_server_says(server):
    page = server.http.get("/").text
    assert len(page.encode()) < 16_000
    assert not re.search(r"https?:|//cdn|@import|url\(|import\s*\(|\son\w+=|\sstyle=", page)
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage", page)


def test_every_link_leads_somewhere(without_key):
    links = set(re.findall(r'href="([a-z][^":]*)"', without_key.http.get("/").text))
    assert links >= {"docs", "dashboard", "metrics", "openapi.json", "v1/models"}
    assert {without_key.http.get(f"/{link}").status_code for link in links} == {200}


def test_the_dashboard_is_in_the_openapi_document(without_key):
    paths = without_key.http.get("/openapi.json").json()["paths"]
    assert {path for path in paths if "dashboard" in path} == {"/dashboard", "/dashboard/data"}


def test_it_asks_for_a_key_and_shows_the_dashboard_where_there_are_any(server, keyed):
    body = {name: re.findall("<body[^>]*>", made.http.get("/").text) for name, made in {"": server, "k": keyed}.items()}
    assert body == {"": ["<body>"], "k": ["<body data-keyed data-dashboard>"]}


def run_page(server: Running, folder: Path, key: str, prompt: str, use: str = USE, other: str = "") -> dict[str, Any]:
    """What the page's own script shows in node, on elements that only remember what was put into them."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    path = folder / "page.js"
    path.write_text(FAKE_BROWSER + inline(server.http.get("/").text, "script") + use)
    done = subprocess.run([node, path, server.url, key, prompt, other], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_shows_what_runs_and_tries_a_request(server, tmp_path):
    seen = run_page(server, tmp_path, "", "hi <b>ü</b> ")
    facts = dict(zip(seen["facts"][::2], seen["facts"][1::2], strict=True))
    assert (facts["Model"], facts["Policy"], facts["Device"]) == ("scripted", "scripted", "cpu")
    assert facts["Context"] == "512 tokens" and "interactive (50 ms)" in facts["Classes of targets"]
    assert seen["state"] == "ok: requests are served" and seen["busy"]
    assert seen["first"]["text"] == "hi <b>ü</b>"
    assert re.fullmatch(r"\d+\.\d ms per token of 40\.0 ms, (met|missed)", seen["first"]["told"])
    assert re.fullmatch(r"[\d.]+%", seen["first"]["width"])
    tried, free = server.engine.submitted[-2:]
    assert (tried.slo.tpot_ms, free.slo.tpot_ms) == (40, None), "four times what one token alone takes"
    assert '"slo_tpot_ms": 40}' in example(server.url, server.state), "as the command that is printed"
    assert re.fullmatch(r"\d+\.\d ms per token, no target", seen["free"])


def test_with_a_key_it_shows_nothing_before_it_is_given(keyed, tmp_path):
    seen = run_page(keyed, tmp_path, "sesame", "hello ")
    assert seen["before"] == ["", "Give the API key to see it."]
    assert "scripted" in seen["facts"] and seen["first"]["text"] == "hello hello "


def test_a_refusal_is_shown_in_the_servers_words(server, tmp_path):
    seen = run_page(server, tmp_path, "", "fail now")
    assert seen["first"]["told"] == "the scripted failure"


def test_one_token_alone_has_a_verdict_and_no_bar(server, tmp_path):
    seen = run_page(server, tmp_path, "", "hello ", ONE_TOKEN)
    assert seen == {"ended": {"told": "one token, no time per token, met", "width": "0%"}, "refused": "0"}


def test_it_asks_again_when_another_server_may_be_there(server, start_server, tmp_path):
    with start_server(ServerSettings(served_model_name="other")) as other:
        seen = run_page(server, tmp_path, "", "", ANOTHER_SERVER, other.url)
    assert seen == {"gone": "nobody answers", "after": "other", "looked_at_again": "scripted"}


class WithoutDraft(ScriptedEngine):
    @property
    def info(self) -> EngineInfo:
        return replace(super().info, policy=self.config.policy)


@pytest.mark.parametrize(
    ("policy", "said"),
    [("ar", "none: no speculation"), ("adaserve", "no draft model: any drafts are from text already seen")],
)
def test_without_a_draft_model_it_says_no_speculation_only_of_plain_decoding(serve_engine, tmp_path, policy, said):
    engine = WithoutDraft(EngineConfig(target="models/scripted", draft=None, policy=policy))
    engine.start()
    with serve_engine(engine, ByteTokenizer(), ServerSettings()) as made:
        facts = run_page(made, tmp_path, "", "hi ")["facts"]
    engine.close()
    assert facts[facts.index("Draft") + 1] == said
