"""API keys: whose a secret is, what each may take, when there is room again, and that no answer tells of a key."""

from __future__ import annotations

import hmac
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.errors import ConfigError
from adaserve_jax.server import auth as keyring_module
from adaserve_jax.server.admission import Slots
from adaserve_jax.server.auth import Keyring, RateLimited, TokenBucket
from adaserve_jax.server.settings import KeySettings, ServerSettings, SloClass, digest_of
from tests.clock import Clock


def keyring_of(*keys: KeySettings, api_key: str | None = None, **options) -> Keyring:
    return Keyring(ServerSettings(api_key=api_key, keys=keys), **options)


class ExactBucket:
    """The same in exact arithmetic, from a list of what was taken and given: the level is computed anew each time."""

    def __init__(self, per_minute: int, burst_s: int):
        self.rate = Fraction(per_minute, 60)
        self.capacity = max(Fraction(1), self.rate * burst_s)
        self.level, self.at = self.capacity, Fraction(0)

    def take(self, now: Fraction, amount: int) -> Fraction:
        self.level, self.at = min(self.capacity, self.level + (now - self.at) * self.rate), now
        if self.level < min(amount, self.capacity):
            return (min(amount, self.capacity) - self.level) / self.rate
        self.level -= amount
        return Fraction(0)

    def give_back(self, now: Fraction, amount: int) -> None:
        self.take(now, 0) if self.level >= 0 else None
        self.level, self.at = min(self.capacity, self.level + (now - self.at) * self.rate), now
        self.level = min(self.capacity, self.level + amount)


steps = st.lists(st.tuples(st.integers(0, 160), st.integers(0, 40), st.booleans()), max_size=25)


@given(st.sampled_from([6, 15, 60, 240]), st.sampled_from([4, 16, 60]), steps)
def test_a_bucket_is_the_exact_one(per_minute: int, burst_s: int, steps: list[tuple[int, int, bool]]):
    clock = Clock()
    begin_s = clock.now_s
    bucket, exact, now = TokenBucket(per_minute, burst_s, clock), ExactBucket(per_minute, burst_s), Fraction(0)
    for sixteenths, amount, back in steps:
        now += Fraction(sixteenths, 16)
        clock.now_s = begin_s + float(now)
        if back:
            bucket.give_back(amount)
            exact.give_back(now, amount)
        else:
            assert bucket.take(amount) == pytest.approx(float(exact.take(now, amount)), abs=1e-5)


def test_the_time_to_wait_is_right_and_nothing_waits_for_ever():
    clock = Clock()
    bucket = TokenBucket(120, 10, clock)  # 2 a second, up to 20
    assert bucket.take(15) == 0
    wait_s = bucket.take(12)
    assert wait_s == pytest.approx(3.5)
    clock.now_s += wait_s - 0.01
    assert bucket.take(12) > 0
    clock.now_s += 0.01
    assert bucket.take(12) == 0
    assert bucket.take(1000) == pytest.approx(10)
    clock.now_s += 10
    assert bucket.take(1000) == 0, "more than it holds is taken from a full one"
    assert bucket.take(1) == pytest.approx((1 + 980) / 2)
    bucket.give_back(990)
    assert bucket.take(10) == 0


def test_the_retry_after_header_is_the_time_until_there_is_room():
    clock = Clock()
    ring = keyring_of(KeySettings("a", "x", requests_per_minute=6, burst_s=20), clock=clock)
    account = ring.find(b"x")
    account.begin_request()
    account.begin_request()
    clock.now_s += 2.5
    with pytest.raises(RateLimited) as caught:
        account.begin_request()
    assert caught.value.headers == {"retry-after": "8"}, "7.5 seconds, whole ones"
    clock.now_s += 7.4
    with pytest.raises(RateLimited) as caught:
        account.begin_request()
    assert caught.value.headers == {"retry-after": "1"}
    clock.now_s += 0.1
    account.begin_request()


def test_a_secret_is_found_however_it_was_configured():
    ring = keyring_of(
        KeySettings("plain", "one"),
        KeySettings("named", key_env="SECRET_TWO"),
        KeySettings("digest", key_sha256=digest_of("three").hex()),
        api_key="four, sesame-ä",
        environ={"SECRET_TWO": " two\n"},
    )
    found = {secret: ring.find(secret.encode()) for secret in ("one", "two", "three", "four", "sesame-ä")}
    assert [account.name for account in found.values()] == ["plain", "named", "digest", "api-key-1", "api-key-2"]
    for wrong in ("", "On", "one ", "ONE", "four, sesame-ä", "sesame", "sesame-ää", digest_of("three").hex(), "None"):
        assert ring.find(wrong.encode()) is None
    assert found["three"].salt("a") == keyring_of(KeySettings("x", "three")).find(b"three").salt("a")
    assert not keyring_of() and ring


def test_every_key_is_compared_in_constant_time_and_that_comparison_decides(monkeypatch):
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    fake = type("Hmac", (), {"compare_digest": staticmethod(compare)})
    monkeypatch.setattr(keyring_module, "hmac", fake)
    ring = keyring_of(KeySettings("a", "x"), KeySettings("b", "y"), KeySettings("c", "z" * 100))
    for secret, name in ((b"x", "a"), (b"y", "b"), (b"z" * 100, "c"), (b"", None), (b"w" * 10_000, None)):
        compared.clear()
        account = ring.find(secret)
        assert (account.name if account else None) == name
        assert len(compared) == 3, "the first that fits does not end the search"
        assert {len(side) for pair in compared for side in pair} == {32}
    fake.compare_digest = staticmethod(lambda a, b: False)
    assert ring.find(b"x") is None


def test_one_secret_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="every API key must be another secret, got one secret for 'a' and 'b'"):
        keyring_of(KeySettings("a", "x"), KeySettings("b", key_sha256=digest_of("x").hex()))
    with pytest.raises(ConfigError, match="'a' must be in the environment variable NOT_THERE, which is not set or emp"):
        keyring_of(KeySettings("a", key_env="NOT_THERE"), environ={})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"name": "a b"}, "name must be 1 to 64 letters"),
        ({"name": "a"}, "one of key, key_env, key_sha256 must be given, got none"),
        ({"key": "topsecret", "key_env": "E"}, "must be given, got key and key_env"),
        ({"key": " topsecret"}, "key must be a text that is not empty and neither begins nor ends with a space"),
        ({"key_sha256": "topsecret"}, "key_sha256 must be 64 digits from 0-9a-f"),
        ({"key": "topsecret", "max_inflight": -1}, "max_inflight must be an integer >= 0, got -1"),
        ({"key": "topsecret", "tokens_per_minute": float("inf")}, "tokens_per_minute must be a finite number >= 0"),
        ({"key": "topsecret", "min_slo_ttft_ms": -1.0}, "min_slo_ttft_ms must be a finite number >= 0, got -1.0"),
        ({"key": "topsecret", "burst_s": 0}, "burst_s must be a finite number of seconds above 0, got 0"),
    ],
)
def test_wrong_keys_are_refused_without_showing_the_secret(values, text):
    with pytest.raises(ConfigError) as caught:
        KeySettings(**{"name": "a", **values})
    assert text in str(caught.value)
    assert "topsecret" not in str(caught.value)
    assert "topsecret" not in repr(ServerSettings(keys=(KeySettings("a", "topsecret"),), api_key="topsecret2"))


KEYS = (
    KeySettings("one-at-a-time", "solo", max_inflight=1),
    KeySettings("few-requests", "req", requests_per_minute=6, burst_s=20),
    KeySettings("few-tokens", "tok", tokens_per_minute=60, burst_s=60),
    KeySettings(
        "bounded", "slow", min_slo_tpot_ms=50, min_slo_ttft_ms=80, slo_classes=("batch", "bulk"), min_priority=5
    ),
    KeySettings("free", "free"),
)
CLASSES = (SloClass("bulk", tpot_ms=20, priority=9, service_tiers=("flex",)), SloClass("vip", priority=-3))


@pytest.fixture(scope="module")
def keyed(start_server):
    with start_server(ServerSettings(keys=KEYS, classes=CLASSES, api_key="plain")) as server:
        yield server


def post(server, secret: str, path: str = "/v1/completions", **body):
    return server.http.post(path, json={"prompt": "abc", **body}, headers={"authorization": f"Bearer {secret}"})


def check_limited(response, seconds: int) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limited"), response.text
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == str(seconds)
    shown = response.text + json.dumps(dict(response.headers))
    assert not any(key.name in shown or f"Bearer {key.key}" in shown for key in KEYS)


def test_requests_are_counted_before_their_bodies_are_read(keyed):
    assert post(keyed, "req").status_code == 200
    assert post(keyed, "req", path="/tokenize").status_code == 200
    check_limited(post(keyed, "req"), 10)
    check_limited(keyed.http.post("/nowhere", content=b"{", headers={"authorization": "Bearer req"}), 10)
    assert keyed.http.get("/v1/models", headers={"authorization": "Bearer req"}).status_code == 200
    assert post(keyed, "free").status_code == 200
    assert (
        'adaserve_rate_limited_total{limit="requests"} 2.0'
        in keyed.http.get("/metrics", headers={"authorization": "Bearer plain"}).text
    )


def test_tokens_are_charged_and_what_was_not_generated_is_given_back(keyed):
    assert post(keyed, "tok", prompt="refuse x", max_tokens=50).status_code == 400  # 58, all given back
    assert post(keyed, "tok", prompt="fail", max_tokens=50).status_code == 500  # 4 + 6 are used, 50 are left
    assert post(keyed, "tok", prompt="abcd", max_tokens=16, n=2).status_code == 200  # 36, 14 are left
    check_limited(post(keyed, "tok", prompt="abcd", max_tokens=20), 10)
    check_limited(post(keyed, "tok", prompt="abcd", max_tokens=400), 46)
    assert post(keyed, "tok", prompt="abcd", max_tokens=9).status_code == 200
    assert keyed.state.slots.used == 0
    text = keyed.http.get("/metrics", headers={"authorization": "Bearer plain"}).text
    assert 'adaserve_rate_limited_total{limit="tokens"} 2.0' in text


def test_choices_in_flight_are_each_keys_own_and_the_servers_too(keyed):
    headers = {"authorization": "Bearer solo"}
    body = {"prompt": "slow", "max_tokens": 400, "stream": True}
    held = keyed.http.send(keyed.http.build_request("POST", "/v1/completions", json=body, headers=headers), stream=True)
    assert keyed.state.slots.used == 1
    check_limited(post(keyed, "solo"), 1)
    assert post(keyed, "free").status_code == 200
    more = post(keyed, "solo", n=2)
    assert (more.status_code, more.json()["error"]["message"]) == (
        400,
        "prompts times n must be at most 1, got 1 times 2",
    )
    held.close()
    for _ in range(500):
        if post(keyed, "solo", max_tokens=1).status_code == 200:
            break
    else:
        raise AssertionError("the room never came back")


@pytest.mark.parametrize(
    ("body", "tpot_ms", "slo_class", "priority"),
    [
        ({}, None, "batch", 5),
        ({"slo_tpot_ms": 10}, 50.0, "batch", 5),
        ({"slo_tpot_ms": 70, "priority": 8}, 70.0, "batch", 8),
        ({"slo_relative": 2}, 50.0, "batch", 5),
        ({"slo_class": "bulk"}, 50.0, "bulk", 9),
        ({"service_tier": "flex", "priority": -100}, 50.0, "bulk", 5),
        ({"service_tier": "auto"}, None, "batch", 5),
    ],
)
def test_a_key_bounds_targets_classes_and_priorities(keyed, body, tpot_ms, slo_class, priority):
    assert post(keyed, "slow", **body).json()["metrics"]["slo"]["tpot_target_ms"] == tpot_ms
    asked = keyed.engine.submitted[-1]
    assert (asked.slo_class, asked.priority) == (slo_class, priority)


@pytest.mark.parametrize(("asked_ms", "given_ms"), [(10, 80.0), (80, 80.0), (90, 90.0)])
def test_a_key_bounds_the_time_to_the_first_token(keyed, asked_ms, given_ms):
    assert post(keyed, "slow", slo_ttft_ms=asked_ms).json()["metrics"]["slo"]["ttft_target_ms"] == given_ms
    assert post(keyed, "free", slo_ttft_ms=asked_ms).json()["metrics"]["slo"]["ttft_target_ms"] == asked_ms


def test_a_class_that_the_key_may_not_use_is_refused(keyed):
    for body, param, named in (
        ({"slo_class": "vip"}, "slo_class", "batch, bulk, got 'vip'"),
        ({"service_tier": "priority"}, "service_tier", "batch, bulk, flex, got 'priority'"),
    ):
        error = post(keyed, "slow", **body).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_slo", param)
        assert error["message"] == f"{param} must be one of {named}"
    assert post(keyed, "free", slo_class="vip").status_code == 200
    assert keyed.engine.submitted[-1].priority == -3


def test_each_key_has_a_salt_of_its_own_and_observers_learn_its_name(keyed):
    ended = []
    keyed.state.observers.append(ended.append)
    salts = set()
    for secret in ("free", "solo", "plain"):
        for body in ({}, {"cache_salt": "a"}):
            assert post(keyed, secret, **body).status_code == 200
            salts.add(keyed.engine.submitted[-1].cache_salt)
    keyed.state.observers.remove(ended.append)
    assert len(salts) == 6
    assert [choice.origin.key for choice in ended[::2]] == ["free", "one-at-a-time", "api-key"]


def test_a_hold_gives_back_what_it_has_and_no_more():
    account = keyring_of(KeySettings("a", "x", max_inflight=4, tokens_per_minute=60, burst_s=60)).find(b"x")
    slots = Slots(8)
    first, second = slots.reserve(account, 3, 0.0, 1), slots.reserve(account, 1, 0.0, 1)
    with pytest.raises(RateLimited, match="4 choices in flight, has 4 and asks for 1"):
        account.require_room(1)
    first.release([1])
    assert account.in_flight == 3
    first.release()
    first.release()
    first.release([1])
    assert account.in_flight == 1
    second.release([0])
    assert account.in_flight == 0
    account.charge(60)
    slots.reserve(account, 2, 0.0, 1).release(unused_tokens=60)
    account.charge(60)


def test_room_that_the_server_has_not_is_given_back_to_the_key(start_server):
    with start_server(ServerSettings(keys=(KEYS[-1],), max_inflight=2)) as server:
        held = server.state.slots.reserve(keyring_of(KeySettings("other", "x")).find(b"x"), 1, 0.0, 1)
        for _ in range(3):
            refused = post(server, "free", n=2)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        never = post(server, "free", n=3)  # nor on an idle server
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        held.release()
        assert server.state.keyring.find(b"free").in_flight == 0
        assert post(server, "free").status_code == 200
        assert server.state.keyring.find(b"free").in_flight == 0
