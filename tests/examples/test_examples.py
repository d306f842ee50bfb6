"""The examples' graphs against the scripted provider."""

from collections.abc import Callable
from types import ModuleType

import pytest
from langchain_openai import ChatOpenAI

from sandfleet.loadtest.provider.server import Provider

Load = Callable[[str, str], ModuleType]


async def test_hello_streams_its_answer_in_pieces(provider: Provider, load: Load) -> None:
    graph = load("examples", "hello").graph
    messages = [{"role": "user", "content": "say hi #id:hello"}]
    pieces = [
        chunk.content async for chunk, _ in graph.astream({"messages": messages}, stream_mode="messages")
    ]
    assert "".join(pieces) == "Hi! How can I help you today?"
    assert len([piece for piece in pieces if piece]) > 1
    assert [a["stream"] for a in provider.arrivals.listed("hello")] == [True]


async def test_hello_comes_through_a_rate_limit_and_an_error(provider: Provider, load: Load) -> None:
    """Breaks with max_retries=0 in the example's model."""
    graph = load("examples", "hello").graph
    faults = '[{"status": 429, "retry_after_s": 0.01}, {"status": 500, "retry_after_s": 0.01}]'
    prompt = '#script:{"text": "made it", "faults": ' + faults + "} #id:retried"
    state = await graph.ainvoke({"messages": [{"role": "user", "content": prompt}]})
    assert state["messages"][-1].content == "made it"
    assert len(provider.arrivals.listed("retried")) == 3


def test_the_environment_names_the_model(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.setenv("SANDFLEET_MODEL", "openai:gpt-5-mini")
    monkeypatch.setenv("OPENAI_API_KEY", "not a real key")
    model = load("examples", "chat_model").chat_model("scripted")
    assert isinstance(model, ChatOpenAI)
    assert model.model_name == "gpt-5-mini"


def test_without_any_model_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.delenv("SANDFLEET_MODEL", raising=False)
    monkeypatch.delenv("SANDFLEET_PROVIDER_URL", raising=False)
    with pytest.raises(RuntimeError, match=r"SANDFLEET_MODEL.*SANDFLEET_PROVIDER_URL"):
        load("examples", "hello")


@pytest.mark.parametrize("prompt", ["Which Fibonacci numbers are prime?", "Something else"])
async def test_the_coders_tools_accept_what_the_scripted_model_asks_for(
    provider: Provider, load: Load, prompt: str
) -> None:
    """Outside an executor there is no sandbox, so each call is answered with that and not with a wrong argument."""
    graph = load("examples", "coder").graph
    state = await graph.ainvoke({"messages": [{"role": "user", "content": prompt}]})
    answers = [message for message in state["messages"] if message.type == "tool"]
    assert [answer.name for answer in answers] == ["write_file", "execute"]
    assert all("There is no sandbox here" in answer.text for answer in answers)
