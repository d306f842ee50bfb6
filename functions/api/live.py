"""Responses whose body is made while the client listens."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)
_PAD_EVERY_S = (
    5.0  # what the SDK's reference server does; proxies cut silent connections after a minute or so
)


class Cut(Exception):
    """Raised by a body that must not end cleanly: the connection breaks, and the SDK goes to ``Location``."""


class Live(Response):
    """Sends the chunks of ``body`` as they come.

    Ends early when the process is about to stop (``closing``): cleanly if ``may_end_early``, which an event stream may,
    else by breaking the connection, so that nobody takes a part for the whole. Calls ``on_disconnect`` when the client
    goes away first.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        *,
        media_type: str,
        headers: Mapping[str, str],
        closing: asyncio.Event,
        may_end_early: bool,
        on_disconnect: Callable[[], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self._chunks = body
        self._closing = closing
        self._may_end_early = may_end_early
        self._on_disconnect = on_disconnect
        self.init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((sending, gone, closing), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                lost = gone.done()
                if lost and self._on_disconnect is not None:
                    self._on_disconnect()
                await _stop(sending)
                if lost or not self._may_end_early:
                    return
            elif not await self._is_whole(sending):
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            closing.cancel()
            await _stop(sending)
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    @staticmethod
    async def _is_whole(sending: Awaitable[None]) -> bool:
        try:
            await sending
        except Cut:
            return False
        except Exception:
            _log.exception("a response broke off")
            return False
        return True


async def _stop(task: "asyncio.Future[None]") -> None:
    """Cancel until it is over: a cancellation that meets a database query may be answered by the query's own error."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=1.0)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def padded(result: Awaitable[bytes]) -> AsyncGenerator[bytes]:
    """A JSON body that comes late: a line feed every five seconds, then ``result``. Leading white space is legal JSON."""
    task = asyncio.ensure_future(result)
    try:
        while not (await asyncio.wait((task,), timeout=_PAD_EVERY_S))[0]:
            yield b"\n"
        yield task.result()
    finally:
        task.cancel()
