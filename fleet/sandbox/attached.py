"""A command whose input and output go on at once, over a websocket: a shell in a terminal, a server on stdin."""

import json
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import aiohttp

from sandfleet.fleet.sandbox.errors import from_host
from sandfleet.shared.errors import HostUnavailable

_STREAMS = {1: "stdout", 2: "stderr"}


class AttachedCommand:
    """A running command. ``events`` says what it prints and how it ends; leaving the context kills it.

    All methods raise SandboxError; input for a command that has ended is dropped.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self, request: dict[str, Any]) -> None:
        """Send the command and wait until the host has begun it. What it raises, the host refused."""
        await self._say(request)
        event = await self._next()
        if event is None or event["event"] != "started":
            raise HostUnavailable("The sandbox host did not begin the command.")

    async def send(self, data: bytes) -> None:
        """Input, as fast as the command takes it."""
        for start in range(0, len(data), 2**16):
            try:
                await self._socket.send_bytes(data[start : start + 2**16])
            except ConnectionError:
                return  # the reader of the events hears why

    async def send_eof(self) -> None:
        """No input follows; in a terminal this is Ctrl-D."""
        await self._say({"input": "eof"})

    async def resize(self, rows: int, columns: int) -> None:
        """Another size of the terminal."""
        await self._say({"resize": {"rows": rows, "columns": columns}})

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """``stdout`` and ``stderr`` with ``data`` as bytes (a terminal has only the first), then one ``exit``."""
        while (event := await self._next()) is not None:
            yield event
            if event["event"] == "exit":
                return
        raise HostUnavailable("The sandbox host went away while the command ran.")

    async def close(self) -> None:
        """Hang up, which kills the command if it still runs."""
        await self._socket.close()

    async def _say(self, message: dict[str, Any]) -> None:
        try:
            await self._socket.send_str(json.dumps(message))
        except ConnectionError:
            return  # the reader of the events hears why

    async def _next(self) -> dict[str, Any] | None:
        message = await self._socket.receive()
        if message.type == aiohttp.WSMsgType.BINARY:
            return {"event": _STREAMS[message.data[0]], "data": message.data[1:]}
        if message.type != aiohttp.WSMsgType.TEXT:
            return None
        event: dict[str, Any] = json.loads(message.data)
        if event["event"] == "error":
            raise from_host(event["code"], event["message"])
        return event
