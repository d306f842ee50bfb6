"""The example that is cut off at every event, as a user runs it."""

import asyncio
import sys
from pathlib import Path

from sandfleet.localstack.stack import Stack

SCRIPT = Path(__file__).parents[2] / "examples" / "rejoin.py"


async def test_the_example_puts_a_run_together_from_a_connection_per_event(stack: Stack) -> None:
    """Red when an event is lost or comes twice behind a cut, or when the SDK, the state and PostgreSQL differ in the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, SCRIPT, "--dev-json", stack.dev_json, "--assistant", "messages"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert "each once. success" in said.decode()
