"""What the command line shares: the console, one clear line for an expected failure, and the end on a signal."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from sandfleet.localstack.entry import INTERRUPTED

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Steps:
    """Prints steps of a start with the seconds since its beginning."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def __call__(self, step: str) -> None:
        out.print(f"[dim]{time.monotonic() - self._since:6.1f} s[/]  {escape(step)}")


def run(
    command: Coroutine[Any, Any, int | None],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a command to its end, on asyncio's own event loop if there is no other, and exit with its code.

    SIGINT, SIGTERM and SIGHUP cancel it once, so that it can clean up in peace, and the exit code is 130. Expected
    failures print one line (or two) without a traceback, exit code 1.
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(_until_signal(command))
    except asyncio.CancelledError:
        code = INTERRUPTED
    except Exception as error:
        if not isinstance(error, _expected()):
            raise
        err.print(f"[bold red]Error:[/] {escape(_explain(error))}")
        code = 1
    raise typer.Exit(code or 0)


def _expected() -> tuple[type[Exception], ...]:
    """Failures that need no traceback. Their libraries are imported now, and not before a command that needs none of them."""
    import psycopg
    from botocore.exceptions import BotoCoreError, ClientError
    from langgraph_sdk.errors import LangGraphError

    from sandfleet.fleet.sandbox_client.errors import ApiError
    from sandfleet.shared.errors import SandfleetError

    return (
        SandfleetError,
        LangGraphError,
        ApiError,
        httpx.HTTPError,
        psycopg.Error,
        BotoCoreError,
        ClientError,
    )


def _explain(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        url = error.request.url
        return f"Nothing answers at {url.scheme}://{url.netloc.decode()}. Is the stack running (`sandfleet dev`)?"
    if isinstance(error, httpx.HTTPStatusError):
        with suppress(ValueError, httpx.ResponseNotRead):
            return f"{error.response.status_code}: {error.response.json().get('detail')}"
    return str(error).strip() or type(error).__name__


async def _until_signal(command: Coroutine[Any, Any, int | None]) -> int | None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(command)
    asked = False

    def end() -> None:
        nonlocal asked
        if asked:
            err.print("Already stopping …")
            return
        asked = True
        err.print("\nStopping …")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    try:
        code = await task
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
    return INTERRUPTED if asked else code
