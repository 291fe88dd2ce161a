"""New API keys while the server runs: taken on SIGHUP, whole or not at all; what keys have used is not forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.server.auth import RateLimited
from adaserve_jax.server.serve import reload_keys, reload_on_hangup
from adaserve_jax.server.settings import KeySettings, ServerSettings
from adaserve_jax.server.state import ServerState
from tests.server.scripted import ScriptedEngine

OLD, NEW = KeySettings("old", "one", requests_per_minute=6, burst_s=20), KeySettings("new", "two")
SETTINGS = ServerSettings(keys=(OLD,))


def state_of(settings: ServerSettings) -> ServerState:
    return ServerState(ScriptedEngine(EngineConfig()), settings)


def names(state: ServerState) -> list[str | None]:
    found = [state.keyring.find(secret) for secret in (b"one", b"two")]
    return [account.name if account is not None else None for account in found]


def test_keys_come_and_go_and_those_that_stay_keep_what_they_used(caplog):
    state = state_of(SETTINGS)
    account = state.keyring.find(b"one")
    account.begin_request()
    reload_keys(state, lambda: replace(SETTINGS, keys=(OLD, NEW)))
    assert names(state) == ["old", "new"] and state.keyring.find(b"one") is account
    held = state.slots.reserve(account, 2, 0.0, 1)
    changed = replace(OLD, requests_per_minute=12.0, burst_s=10, max_inflight=2, name="renamed", operator=True)
    reload_keys(state, lambda: replace(SETTINGS, keys=(changed, NEW)))
    assert state.keyring.find(b"one") is account and account.name == "renamed" and account.is_operator
    account.begin_request()  # two within 10 s, of which one was taken before
    with pytest.raises(RateLimited, match="12 requests per minute"):
        account.begin_request()
    with pytest.raises(RateLimited, match="2 choices in flight, has 2 and asks for 1"):
        account.require_room(1)
    held.release()
    account.require_room(2)
    reload_keys(state, lambda: replace(SETTINGS, keys=(NEW,)))
    assert names(state) == [None, "new"]
    assert caplog.messages == [f"the server has {count} API keys now" for count in (2, 2, 1)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (ServerSettings(), "at least one API key must be left"),
        (ServerSettings(keys=(NEW, KeySettings("same", "two"))), "every API key must be another secret"),
        (
            ServerSettings(keys=(NEW, KeySettings("gone", key_env="NOT_IN_THE_ENVIRONMENT"))),
            "must be in the environment",
        ),
        (None, "adaserve.toml: expected TOML"),
    ],
)
def test_what_is_wrong_changes_nothing_and_is_logged(caplog, settings, text):
    def reread() -> ServerSettings:
        if settings is None:
            raise ConfigError("adaserve.toml: expected TOML")
        return settings

    state = state_of(SETTINGS)
    reload_keys(state, reread)
    assert names(state) == ["old", None]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the API keys are as before: ") and text in caplog.messages[0]


def test_a_server_without_keys_stays_open_and_says_so(caplog):
    state = state_of(ServerSettings())
    reload_keys(state, lambda: SETTINGS)
    assert not state.keyring and "started without API keys" in caplog.text


def test_the_signal_does_it():
    async def hang_up(state: ServerState) -> None:
        reload_on_hangup(state, lambda: replace(SETTINGS, keys=(NEW,)))
        os.kill(os.getpid(), signal.SIGHUP)
        while names(state) != [None, "new"]:
            await asyncio.sleep(0.001)

    state = state_of(SETTINGS)
    asyncio.run(asyncio.wait_for(hang_up(state), 10))
