"""``sandfleet run PROMPT``: one run of an assistant, printed as it streams."""

from pathlib import Path

from sandfleet.localstack.connection import connect
from sandfleet.localstack.event_printer import EventPrinter
from sandfleet.localstack.following import run_prompt
from sandfleet.localstack.terminal import out


async def run(root: Path, prompt: str, assistant: str) -> int:
    """Run a prompt in a new thread; 0 if the run succeeded."""
    printer = EventPrinter(out)
    async with connect(root) as client:
        thread_id, run_id = await run_prompt(client, assistant, prompt, printer)
        status = (await client.runs.get(thread_id, run_id))["status"]
    out.print(f"[dim]{status}  run {run_id}  thread {thread_id}[/]")
    return 0 if status == "success" else 1
