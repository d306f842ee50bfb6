"""``sandfleet bench``: start a stack with one API and one executor, and measure it beside the baseline."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sandfleet.localstack.stack import Stack
from sandfleet.localstack.terminal import Steps


async def bench(root: Path, project: Path, arguments: Sequence[str]) -> int:
    """Run ``python -m sandfleet.loadtest.bench`` with these arguments on a new stack; its exit code."""
    stack = Stack(root, project, say=Steps())
    try:
        await stack.start()
        command = [sys.executable, "-m", "sandfleet.loadtest.bench", "--dev-json", str(stack.dev_json)]
        child = await asyncio.create_subprocess_exec(*command, *arguments)
        try:
            return await child.wait()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            await child.wait()
            raise
    finally:
        await stack.stop()
