"""A background process of a sandbox: a server, or a shell in a terminal."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import httpx

from sandfleet.fleet.sandbox_client.errors import told
from sandfleet.fleet.sandbox_client.wire import events

if TYPE_CHECKING:
    from sandfleet.fleet.sandbox_client.sandbox import Sandbox

_PAUSE_S = 0.5
_NEXT_S = 0.1
_PATIENCE = 20  # looks for an API that does not answer


class Process:
    """It goes on without its caller, and ends with its sandbox. All methods raise ApiError."""

    def __init__(self, sandbox: "Sandbox", process: int) -> None:
        self._sandbox = sandbox
        self.process = process
        """Its number in the sandbox."""
        self.offset = 0
        """Bytes of its output that `output` has given."""
        self.lost_bytes = 0
        """Bytes of its output that were kept no more when `output` asked for them."""
        self.exit_code: int | None = None
        self.signal: int | None = None

    async def output(self) -> AsyncGenerator[bytes]:
        """Its output from ``offset`` on, stdout and stderr as they come, until it ends; then ``exit_code`` or ``signal`` is
        set. A connection that breaks is made again, and nothing is missed by that."""
        broken = 0
        while True:
            try:
                params: dict[str, str | int] = {"offset": self.offset, "encoding": "base64"}
                async with (
                    self._sandbox.open("GET", f"{self._path}/output/stream", params=params) as response,
                    aclosing(events(response)) as found,
                ):
                    async for name, data, last in found:
                        broken = 0
                        if name == "error":
                            raise self._sandbox.noted(told(data))
                        self.offset = int(last or self.offset)
                        if name == "exit":
                            self.exit_code, self.signal = data["exit_code"], data["signal"]
                            return
                        self.lost_bytes += data["lost_bytes"]
                        yield base64.b64decode(data["data"])
                await asyncio.sleep(_NEXT_S)  # the API stops, or ends its responses after a while
            except httpx.HTTPError:
                broken += 1
                if broken > _PATIENCE:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def state(self, wait_s: float = 0) -> dict[str, Any]:
        """``running``, ``exit_code``, ``signal`` and more, at its end or after ``wait_s`` (60 at most)."""
        params = {"wait_ms": int(wait_s * 1000)}
        found: dict[str, Any] = await self._sandbox.json("GET", self._path, params=params, patient=True)
        return found

    async def write(self, data: bytes, *, close: bool = False) -> None:
        """Write to its stdin or terminal; returns when it has taken all."""
        params = {"close": int(close)}
        path = f"{self._path}/stdin"
        await self._sandbox.json("PUT", path, params=params, content=data, patient=True)

    async def resize(self, rows: int, columns: int) -> None:
        """Another size of its terminal."""
        await self._sandbox.json("POST", f"{self._path}/resize", {"rows": rows, "columns": columns})

    async def send_signal(self, number: int) -> None:
        """Send a signal to its process group."""
        await self._sandbox.json("POST", f"{self._path}/signal", {"signal": number})

    async def kill(self) -> None:
        """Kill it with all that it has started, and forget it."""
        await self._sandbox.json("DELETE", self._path)

    @property
    def _path(self) -> str:
        return f"/processes/{self.process}"
