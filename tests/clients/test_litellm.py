"""litellm: its client's texts, streams, tools, JSON and errors."""

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PACKAGE = "litellm"


def test_what_it_reports(clients):
    found = clients.report("use_litellm.py")
    assert found["text"] and found["text"] == found["streamed"]
    assert 0 < found["tokens"] == found["streamed_tokens"] <= 60
    assert found["calls"] and all(name == "get_weather" for name, _ in found["calls"])
    assert all(arguments["city"] in ("Rome", "Oslo") for _, arguments in found["calls"])
    assert found["shaped"]["city"] in ("Rome", "Oslo")
    assert found["plain"] and "temperature" in found["refused"]
