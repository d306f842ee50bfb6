"""Files of a sandbox, as the agent's READ, WRITE and FILES offer them."""

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.sandbox_agent import wire
from sandfleet.shared.ids import Fence

_SEARCH_S = 10.0  # for a search that names no time of its own
_CHANGE_S = 60.0


async def read(
    sandbox: Sandbox, fence: Fence, path: str, offset: int, limit: int
) -> AsyncGenerator[bytes, None]:
    """Content of a file in pieces, from ``offset``, at most ``limit`` bytes."""
    spec = {"path": path, "offset": offset, "limit": limit}
    async with sandbox.operation(fence, wire.READ, spec, limit) as operation:
        while (item := await operation.take()) is not None:
            yield item[1]


async def write(
    sandbox: Sandbox,
    fence: Fence,
    path: str,
    content: AsyncIterable[bytes],
    *,
    mode: int | None,
    append: bool,
) -> dict[str, Any]:
    """Replace a file, whose old content stays until all of the new one has come, or append to it; makes directories.

    Returns ``size``, the bytes that were written.
    """
    spec = {"path": path, "mode": mode, "append": append}
    return await sandbox.give(fence, wire.WRITE, spec, content)


async def stat(sandbox: Sandbox, fence: Fence, path: str) -> dict[str, Any]:
    """``kind``, ``size`` (bytes), ``mode`` (permission bits) and ``modified_s`` of what a path leads to."""
    return await sandbox.ask(fence, wire.FILES, {"do": "stat", "path": path})


async def search(sandbox: Sandbox, fence: Fence, do: str, spec: dict[str, Any]) -> dict[str, Any]:
    """``list``, ``glob`` or ``grep``: ``entries`` or ``matches``, and whether more was cut off or time ran out."""
    found, result = await sandbox.ask_lines(fence, wire.FILES, {"timeout_s": _SEARCH_S, **spec, "do": do})
    return {"matches" if do == "grep" else "entries": found, **result}


async def change(sandbox: Sandbox, fence: Fence, do: str, spec: dict[str, Any]) -> None:
    """``mkdir``, ``move``, ``copy`` or ``remove``."""
    await sandbox.ask(fence, wire.FILES, {"timeout_s": _CHANGE_S, **spec, "do": do})
