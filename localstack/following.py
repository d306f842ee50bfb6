"""Run an assistant or join a run, and print its events until it ends."""

from typing import Any

from langgraph_sdk.client import LangGraphClient

from sandfleet.localstack.event_printer import EventPrinter

STREAM_MODES: Any = ["messages-tuple", "updates", "tools"]


def asked(prompt: str) -> dict[str, Any]:
    """The input of an agent: what its user says."""
    return {"messages": [{"role": "user", "content": prompt}]}


async def run_assistant(
    client: LangGraphClient,
    assistant: str,
    printer: EventPrinter,
    *,
    thread_id: str | None = None,
    input: Any = None,
    command: Any = None,
) -> tuple[str, str]:
    """Run an assistant on an input or a command, on this thread or a new one, and print the stream.

    Returns the ids of thread and run.
    """
    thread = thread_id or (await client.threads.create())["thread_id"]
    run_id = ""
    async for part in client.runs.stream(
        thread, assistant, input=input, command=command, stream_mode=STREAM_MODES, stream_resumable=True
    ):
        if part.event == "metadata" and isinstance(part.data, dict):
            run_id = part.data.get("run_id", run_id)
        printer.feed(part.event, part.data)
    printer.close()
    return thread, run_id


async def follow_run(client: LangGraphClient, thread_id: str, run_id: str, printer: EventPrinter) -> None:
    """Print the events of a run from its beginning until it ends."""
    async for part in client.runs.join_stream(
        thread_id, run_id, stream_mode=STREAM_MODES, last_event_id="-1"
    ):
        printer.feed(part.event, part.data)
    printer.close()
