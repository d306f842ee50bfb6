"""Finding the agent of a sandbox that an earlier life of this host has left, among all who dial from inside."""

import asyncio
import socket
from contextlib import suppress
from functools import partial
from typing import Any

from sandfleet.fleet.host.agent_link import AgentLink
from sandfleet.fleet.host.results import ProtocolError

BACKLOG = 128  # connections that wait: its agent does not block in dialling until there are more
_HEARD_AT_ONCE = (
    16  # of those who dialled and said nothing yet; one more, and the one that waits longest is left
)
_DIALS_PER_S = 200.0  # are accepted: who dials without end does not take the host's time


async def come_back(listener: socket.socket, secret: str, patience_s: float) -> AgentLink:
    """The agent's connection, which it proves by the ``secret``. Anything else in the sandbox may dial too, say nothing or
    lies: nobody waits for it. The caller bounds the time. Raises OSError if nothing can be accepted."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[AgentLink] = loop.create_future()
    heard: dict[asyncio.Task[None], None] = {}  # oldest first

    async def hear(connection: socket.socket) -> None:
        with suppress(ProtocolError):
            link = await AgentLink.greet(connection, secret, patience_s=patience_s, again=True)
            if found.done():
                link.close("another has come before")
            else:
                found.set_result(link)

    async def accept() -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            if len(heard) >= _HEARD_AT_ONCE:
                next(iter(heard)).cancel()
            task = asyncio.create_task(hear(connection), name="hear who dials")
            heard[task] = None
            task.add_done_callback(partial(left, connection))
            await asyncio.sleep(1 / _DIALS_PER_S)

    def left(connection: socket.socket, task: asyncio.Task[None]) -> None:
        heard.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            connection.close()

    accepting = asyncio.create_task(accept(), name="accept who dials")
    try:
        either: list[asyncio.Future[Any]] = [accepting, found]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            accepting.result()
        return found.result()
    except BaseException:
        if found.done():
            found.result().close("nobody waits for it any more")
        raise
    finally:
        waiting = [accepting, *heard]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
