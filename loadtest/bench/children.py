"""Child processes of the benchmark: started, waited for until they serve, and stopped again."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 10.0


@asynccontextmanager
async def child(
    name: str,
    command: list[str],
    env: Mapping[str, str],
    log: Path,
    ready: Callable[[], Awaitable[bool]],
) -> AsyncIterator[int]:
    """Run a command with its output in ``log`` and yield its process id once ``ready``; SIGTERM at the end.

    Raises RuntimeError with the end of the log if it ends or stays unready for a minute.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **env}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        async with asyncio.timeout(_START_DEADLINE_S):
            while not await _answers(ready):
                if process.returncode is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{_tail(log)}")
                await asyncio.sleep(0.05)
        yield process.pid
    except TimeoutError:
        raise RuntimeError(f"{name} is not ready after {_START_DEADLINE_S:g} s:\n{_tail(log)}") from None
    finally:
        await _stop(process)


async def _answers(ready: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await ready()
    except OSError:
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_DEADLINE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def module(name: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", name]
