"""Adapters over HTTP: a request names one as its model, /v1/models lists them, and operators load and unload them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.adapters import AdapterTable
from adaserve_jax.errors import ConfigError
from adaserve_jax.server.serve import run
from adaserve_jax.server.settings import KeySettings, ServerSettings
from tests.server.conftest import Running
from tests.server.scripted import ByteTokenizer, ScriptedEngine

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of adapters, with one outside it that a link in it leads to."""
    tmp_path = tmp_path_factory.mktemp("adapters")
    for name in ("root/sql", "root/deep/er", "root/none", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        if not name.endswith("none"):
            (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "root"


@pytest.fixture(scope="module")
def with_room(serve_engine, folder: Path) -> Iterator[Running]:
    """Serve with room for two adapters."""
    engine = ScriptedEngine(EngineConfig(target="models/scripted", lora=(f"sql={folder / 'sql'}",), max_loras=2))
    engine.start()
    with serve_engine(engine, ByteTokenizer(), ServerSettings(lora_folder=str(folder))) as server:
        yield server
    engine.close()


@pytest.fixture
def adapted(with_room: Running) -> Running:
    """Return a server with one adapter and room for two."""
    with_room.engine.adapters = AdapterTable(2)
    with_room.engine.adapters.bind("sql", 1)
    return with_room


def served(server: Running) -> dict[str, str | None]:
    return {card["id"]: card["parent"] for card in server.http.get("/v1/models").json()["data"]}


def check(response: httpx.Response, status: int, code: str, param: str | None, text: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert text in error["message"]


@pytest.mark.parametrize(("model", "adapter"), [("sql", "sql"), ("scripted", ""), (None, "")])
def test_a_request_names_an_adapter_as_its_model(adapted: Running, model: str | None, adapter: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", chat), ("/v1/responses", {"input": "x"}),
    ):  # fmt: skip
        limit = {"max_output_tokens" if "input" in body else "max_tokens": 4}
        response = adapted.post(path, model=model, **limit, **body)
        assert (response.status_code, response.json()["model"]) == (200, model or "scripted")
        assert adapted.engine.submitted[-1].adapter == adapter


def test_models_are_listed_and_found_by_name(adapted: Running) -> None:
    assert served(adapted) == {"scripted": None, "sql": "scripted"}
    card = adapted.http.get("/v1/models/sql").json()
    assert (card["id"], card["parent"], card["max_model_len"]) == ("sql", "scripted", 512)
    response = adapted.post(model="unknown", prompt="x")
    expected = "model 'unknown' is not served here; this server has 'scripted', 'sql'"
    check(response, 404, "model_not_found", "model", expected)


def test_adapters_are_loaded_replaced_and_unloaded(adapted: Running) -> None:
    answer = adapted.post(LOAD, lora_name="deep/one", lora_path="deep/er")
    assert answer.status_code == 200
    assert {card["id"] for card in answer.json()["data"]} == {"scripted", "sql", "deep/one"} == set(served(adapted))
    assert adapted.http.get("/v1/models/deep/one").json()["parent"] == "scripted"
    assert adapted.post(model="deep/one", prompt="x", max_tokens=1).json()["model"] == "deep/one"
    again = {"lora_name": "sql", "lora_path": "sql"}
    check(adapted.post(LOAD, **again), 400, "invalid_request", "lora_name", "loaded already; unload it first")
    assert adapted.post(LOAD, load_inplace=True, **again).status_code == 200
    full = adapted.post(LOAD, lora_name="more", lora_path="sql")
    check(full, 400, "no_adapter_slot", "lora_name", "all 2 adapters that have room are loaded")
    assert adapted.post(UNLOAD, lora_name="sql").status_code == 200
    assert served(adapted) == {"scripted": None, "deep/one": "scripted"}
    check(adapted.post(model="sql", prompt="x"), 404, "model_not_found", "model", "'sql' is not served here")
    gone = adapted.post(UNLOAD, lora_name="sql")
    check(gone, 404, "model_not_found", "lora_name", "adapter 'sql' must be one that is loaded: deep/one")
    assert adapted.post(LOAD, lora_name="more", lora_path="sql").status_code == 200


def test_fields_that_other_servers_know_are_warned_about(adapted: Running) -> None:
    answer = adapted.post(LOAD, lora_name="more", lora_path="sql", lora_int_id=3)
    assert answer.status_code == 200
    assert "lora_int_id" in answer.headers["x-adaserve-warning"]


@pytest.mark.parametrize("path", ["..", "../elsewhere", "link", ".", "", "/etc", "a\0b", "x" * 5000])
def test_nothing_outside_the_folder_is_read(adapted: Running, path: str) -> None:
    response = adapted.post(LOAD, lora_name="more", lora_path=path)
    check(response, 400, "invalid_value", "lora_path", "lora_path must be a folder in the server's lora_folder, got")
    assert "more" not in served(adapted)


def test_a_whole_path_in_the_folder_is_one_too(adapted: Running, folder: Path) -> None:
    assert adapted.post(LOAD, lora_name="more", lora_path=str(folder / "deep" / "er")).status_code == 200


def test_wrong_bodies_and_folders_are_refused(adapted: Running) -> None:
    check(adapted.post(LOAD, lora_name="more"), 400, "missing_field", "lora_path", "lora_path must be given")
    check(adapted.post(UNLOAD), 400, "missing_field", "lora_name", "lora_name must be given")
    own = adapted.post(LOAD, lora_name="scripted", lora_path="sql")
    check(own, 400, "invalid_value", "lora_name", "another name than the served model's, got 'scripted'")
    empty = adapted.post(LOAD, lora_name="more", lora_path="none")
    check(empty, 400, "invalid_adapter", "lora_path", "adapter_config.json is missing")
    spaced = adapted.post(LOAD, lora_name="a b", lora_path="sql")
    check(
        spaced, 400, "invalid_request", "lora_name", "lora_name must be 1 to 128 letters, digits and ._/:-, got 'a b'"
    )


def test_the_routes_are_off_without_a_folder(server: Running) -> None:
    for path, body in ((LOAD, {"lora_name": "a", "lora_path": "b"}), (UNLOAD, {"lora_name": "a"})):
        check(server.post(path, **body), 403, "not_allowed", None, "start the server with lora_folder")


def test_an_engine_without_room_says_so(start_server, folder: Path) -> None:
    with start_server(ServerSettings(lora_folder=str(folder))) as server:
        response = server.post(LOAD, lora_name="sql", lora_path="sql")
        check(response, 400, "invalid_request", "lora_name", "this engine has no room for adapters; start it with")


def test_an_operators_key_is_needed(start_server, folder: Path) -> None:
    keys = (KeySettings("boss", "a", operator=True), KeySettings("guest", "b", operator=False))
    with start_server(ServerSettings(keys=keys, lora_folder=str(folder))) as server:
        for path, body in ((LOAD, {"lora_name": "a", "lora_path": "sql"}), (UNLOAD, {"lora_name": "a"})):
            for key, status, code in (("b", 403, "not_allowed"), ("c", 401, "invalid_api_key")):
                response = server.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
                assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            response = server.http.post(path, json=body, headers={"authorization": "Bearer a"})
            assert response.status_code in (400, 404)


def test_an_adapter_of_the_models_name_is_refused_at_the_start(folder: Path) -> None:
    config = EngineConfig(target="models/sql", lora=(f"sql={folder / 'sql'}",))
    with pytest.raises(ConfigError, match="lora must have other names than the served model, got 'sql'; rename"):
        run(ServerSettings(), config, in_process=True)
