"""A running provider and what the tests ask of it."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
from langchain_openai import ChatOpenAI

from sandfleet.loadtest.provider.server import Provider


@dataclass
class Served:
    """A running provider and a client for it."""

    provider: Provider
    url: str
    http: httpx.AsyncClient

    def body(self, prompt: str = "hi", *, stream: bool = True, **more: Any) -> dict[str, Any]:
        """A chat completion request with one human message."""
        messages = [{"role": "user", "content": prompt}]
        return {"model": "scripted", "messages": messages, "stream": stream, **more}

    async def post(self, prompt: str = "hi", *, stream: bool = True, **more: Any) -> httpx.Response:
        """Ask for a completion and read the whole answer."""
        return await self.http.post("/v1/chat/completions", json=self.body(prompt, stream=stream, **more))

    def streamed(self, prompt: str) -> Any:
        """Open a streamed completion, to be read line by line."""
        return self.http.stream("POST", "/v1/chat/completions", json=self.body(prompt))

    def chat(self, model: str = "scripted", max_retries: int = 0) -> ChatOpenAI:
        """A LangChain model that talks to the provider."""
        return ChatOpenAI(
            model=model,
            base_url=f"{self.url}/v1",
            api_key="scripted",
            max_retries=max_retries,
            streaming=True,
        )

    async def arrivals(self, id: str | None = None) -> list[dict[str, Any]]:
        """What the provider recorded."""
        answer = await self.http.get("/_requests", params={"id": id} if id else {})
        requests: list[dict[str, Any]] = answer.json()["requests"]
        return requests


def script(**fields: Any) -> str:
    """A ``#script:`` directive."""
    return f"#script:{json.dumps(fields)}"


def texts(answer: httpx.Response) -> list[str]:
    """The text of each chunk of a streamed answer that was read to its end."""
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]
