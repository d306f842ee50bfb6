"""Be cut off after each event of a run, rejoin by the last id, and see that no event is lost and none comes twice.

    make dev                                  # in another terminal
    .venv/bin/python examples/rejoin.py

It finds the stack by its ``dev.json``, uses the LangGraph SDK for everything, and asks PostgreSQL at the end whether it knows
the same. Exit code 0 if all agree.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import psycopg
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

MODES: Any = ["messages-tuple", "updates"]
ASKED: Any = {"messages": [{"role": "user", "content": "Say hi"}]}
Event = tuple[str, str, str]  # id, name, data


async def first_of(stream: Any) -> Event:
    """The next event of a stream, which is cut off behind it."""
    async for part in stream:
        await stream.aclose()
        return part.id, part.event, json.dumps(part.data)
    raise SystemExit("the stream ended without an end")


async def cut_off_at_every_event(
    client: LangGraphClient, thread_id: str, assistant: str
) -> tuple[str, list[Event]]:
    """Run an assistant; the id of the run and its events, each of them read on a connection of its own."""
    created: list[Any] = []
    stream = client.runs.stream(
        thread_id,
        assistant,
        input=ASKED,
        stream_mode=MODES,
        stream_resumable=True,
        on_run_created=created.append,
    )
    events = [await first_of(stream)]
    run_id = created[0]["run_id"]
    while events[-1][1] != "end":
        last_id = events[-1][0]
        events.append(await first_of(client.runs.join_stream(thread_id, run_id, last_event_id=last_id)))
    return run_id, events


async def stored(database_url: str, thread_id: str, run_id: str) -> tuple[str, str]:
    """What PostgreSQL has: the run's status and the text of the thread's last message."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        cursor = await connection.execute(
            """select r.status, s."values" #>> '{messages,-1,content}' from runs r, state_snapshots s
               where r.run_id = %s and s.thread_id = %s and s.ns = '' order by s.seq desc limit 1""",
            (run_id, thread_id),
        )
        row = await cursor.fetchone()
    assert row is not None
    return row


async def main(dev: dict[str, Any], assistant: str) -> None:
    """``dev`` is what a stack's ``dev.json`` says."""
    async with get_client(url=dev["api_url"], api_key=dev["api_key"]) as client:
        thread_id = (await client.threads.create())["thread_id"]
        run_id, events = await cut_off_at_every_event(client, thread_id, assistant)
        for event_id, name, data in events:
            print(f"{event_id:>6}  {name:<10}{data[:100]}")
        whole = [
            (part.id, part.event, json.dumps(part.data))
            async for part in client.runs.join_stream(thread_id, run_id, stream_mode=MODES, last_event_id="0")
        ]
        assert events == whole, "what was put together is not what the run has said"
        assert len({event_id for event_id, _, _ in events}) == len(events), "an event came twice"
        text = "".join(json.loads(data)[0]["content"] for _, name, data in events if name == "messages")
        status = (await client.runs.get(thread_id, run_id))["status"]
        state: Any = (await client.threads.get_state(thread_id))["values"]
    answers = {text, state["messages"][-1]["content"]}
    assert {(status, answer) for answer in answers} == {await stored(dev["database_url"], thread_id, run_id)}
    print(f"{len(events)} events on {len(events)} connections, each once. {status}: {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dev-json", type=Path, default=Path(".sandfleet/dev.json"))
    parser.add_argument("--assistant", default="hello")
    given = parser.parse_args()
    asyncio.run(main(json.loads(given.dev_json.read_text()), given.assistant))
