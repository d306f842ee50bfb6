"""``sandfleet run``: one run of an assistant, printed as it streams."""

import json
import shlex
from pathlib import Path
from typing import Any

from sandfleet.localstack.connection import choose_assistant, connect
from sandfleet.localstack.event_printer import EventPrinter
from sandfleet.localstack.following import asked, run_assistant
from sandfleet.localstack.process import LocalStackError
from sandfleet.localstack.terminal import out


async def run(
    root: Path,
    prompt: str | None,
    assistant: str | None,
    *,
    input: str | None = None,
    resume: str | None = None,
    thread_id: str | None = None,
) -> int:
    """Run a prompt, an input (JSON), or the answer to what a thread waits for (JSON, else text); 0 if the run succeeded.

    Raises `LocalStackError` unless it is exactly one of them, and for an answer without a thread.
    """
    if [prompt, input, resume].count(None) != 2:
        raise LocalStackError("Give one of: a prompt, --input JSON, or --resume ANSWER.")
    if resume is not None and thread_id is None:
        raise LocalStackError("Say with --thread which thread waits for the answer.")
    given: Any = None if prompt is None else asked(prompt)
    if input is not None:
        try:
            given = json.loads(input)
        except ValueError as error:
            raise LocalStackError(f"--input is not JSON: {error}") from None
    command = None if resume is None else {"resume": _json_or_text(resume)}
    printer = EventPrinter(out)
    async with connect(root) as client:
        chosen = await choose_assistant(client, assistant)
        thread_id, run_id = await run_assistant(
            client, chosen, printer, thread_id=thread_id, input=given, command=command
        )
        status = (await client.runs.get(thread_id, run_id))["status"]
    out.print(f"[dim]{status}  run {run_id}  thread {thread_id}[/]")
    if printer.paused:
        named = "" if assistant is None else f" --assistant {shlex.quote(assistant)}"
        out.print(f"It waits for an answer: sandfleet run{named} --thread {thread_id} --resume ANSWER")
    return 0 if status == "success" else 1


def _json_or_text(answer: str) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        return answer
