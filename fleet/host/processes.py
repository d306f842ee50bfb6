"""Background processes of a sandbox. They belong to it and not to an attempt: the next one finds them running."""

from collections.abc import AsyncIterable
from typing import Any

from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.sandbox_agent import wire
from sandfleet.shared.ids import Fence

# State of a process: process (its number), pid, running, exit_code, signal, next_offset (of its output).
State = dict[str, Any]


async def start(sandbox: Sandbox, fence: Fence, spec: dict[str, Any]) -> State:
    """Start ``argv`` or ``shell``, with ``cwd``, ``env``, ``stdin`` (bool) and ``pty`` if wanted."""
    return await sandbox.ask(fence, wire.PROCESS, {**spec, "do": "start"})


async def list_all(sandbox: Sandbox, fence: Fence) -> list[dict[str, Any]]:
    """All, also ended ones that are remembered: state, ``command``, ``age_s``, ``terminal``, ``stdin`` (still open)."""
    return (await sandbox.ask_lines(fence, wire.PROCESS, {"do": "list"}))[0]


async def read(
    sandbox: Sandbox, fence: Fence, process: int, *, offset: int, limit: int, wait_s: float
) -> tuple[State, bytes]:
    """Output from ``offset``, after at most ``wait_s`` if there is none yet.

    The state also says at which ``offset`` the output begins, and the ``lost_bytes`` between the one asked for and it.
    """
    spec = {"do": "read", "process": process, "offset": offset, "limit": limit, "wait_s": wait_s}
    async with sandbox.operation(fence, wire.PROCESS, spec, wire.RING) as operation:
        parts = []
        while (item := await operation.take()) is not None:
            parts.append(item[1])
        return dict(operation.result or {}), b"".join(parts)


async def write(
    sandbox: Sandbox, fence: Fence, process: int, content: AsyncIterable[bytes], close: bool
) -> dict[str, Any]:
    """Write to its stdin or terminal, and ``close`` it then; returns ``size`` once the process has taken it all."""
    spec = {"do": "write", "process": process, "close": close}
    return await sandbox.give(fence, wire.PROCESS, spec, content)


async def tell(sandbox: Sandbox, fence: Fence, do: str, process: int, **more: Any) -> State:
    """``signal`` (signal), ``wait`` (wait_s), ``resize`` (rows, columns) or ``kill`` (forget): its state then."""
    return await sandbox.ask(fence, wire.PROCESS, {"do": do, "process": process, **more})
