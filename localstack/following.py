"""Run an assistant or join a run, and print its events until it ends."""

from typing import Any

from langgraph_sdk.client import LangGraphClient

from sandfleet.localstack.event_printer import EventPrinter

STREAM_MODES: Any = ["messages-tuple", "updates", "tools"]


async def run_prompt(
    client: LangGraphClient, assistant: str, prompt: str, printer: EventPrinter
) -> tuple[str, str]:
    """Run an assistant on a prompt in a new thread, print the stream, and return the ids of thread and run."""
    thread = await client.threads.create()
    run_id = ""
    messages: Any = [{"role": "user", "content": prompt}]
    async for part in client.runs.stream(
        thread["thread_id"],
        assistant,
        input={"messages": messages},
        stream_mode=STREAM_MODES,
        stream_resumable=True,
    ):
        if part.event == "metadata" and isinstance(part.data, dict):
            run_id = part.data.get("run_id", run_id)
        printer.feed(part.event, part.data)
    printer.close()
    return thread["thread_id"], run_id


async def follow_run(client: LangGraphClient, thread_id: str, run_id: str, printer: EventPrinter) -> None:
    """Print the events of a run from its beginning until it ends."""
    async for part in client.runs.join_stream(
        thread_id, run_id, stream_mode=STREAM_MODES, last_event_id="-1"
    ):
        printer.feed(part.event, part.data)
    printer.close()
