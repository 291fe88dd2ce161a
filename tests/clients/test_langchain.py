"""langchain-openai: its chat model with streams, tools and structured output."""

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PACKAGE = "langchain_openai"


def test_what_it_reports(clients):
    found = clients.report("use_langchain.py")
    assert found["text"] and found["text"] == found["streamed"]
    assert found["calls"] and not found["invalid"] and found["last"]
    assert found["results"] == [f"warm in {arguments['city']}" for _, arguments in found["calls"]]
    for weather in found["structured"].values():
        assert weather["city"] in ("Rome", "Oslo") and weather["sky"] in ("clear", "grey")
