"""What the tests of sandboxes without a run do again and again."""

import json
from typing import Any

import httpx


async def make(http: httpx.AsyncClient, **body: Any) -> str:
    """A new sandbox; its path."""
    made = await http.post("/sandboxes", json=body)
    assert made.status_code == 201, made.text
    return f"/sandboxes/{made.json()['sandbox_id']}"


async def run(http: httpx.AsyncClient, path: str, command: str | list[str], **more: Any) -> dict[str, Any]:
    """A command that is accepted; its result."""
    ran = await http.post(f"{path}/exec", json={"command": command, **more})
    assert ran.status_code == 200, ran.text
    found: dict[str, Any] = ran.json()
    return found


async def events(response: httpx.Response) -> list[tuple[str, Any, str | None]]:
    """All server-sent events of a response: name, data, id."""
    assert response.status_code == 200, await response.aread()
    assert response.headers["content-type"].startswith("text/event-stream")
    found, fields = [], {}
    async for line in response.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            found.append((fields["event"], json.loads(fields["data"]), fields.get("id")))
            fields = {}
    return found
