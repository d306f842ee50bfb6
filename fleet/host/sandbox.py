"""One sandbox: its folder, its backend process, its agent, and what runs in it for which attempt."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from sandfleet.fleet.host.agent_link import AgentLink, Operation, ProtocolError
from sandfleet.fleet.host.backend import Backend, Launch
from sandfleet.fleet.sandbox.errors import HostUnavailable, OperationRefused, StaleAttempt
from sandfleet.fleet.sandbox_agent import agent as wire
from sandfleet.shared.errors import SandboxError, SandfleetError
from sandfleet.shared.ids import Fence, RunKey

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
# Past its own deadline for a kill the agent has given up or is broken: then the host kills from outside.
_KILL_TIMEOUT_S = wire.KILL_AT_MOST_S + 2.0
_MAX_LISTING_BYTES = 16 * 1024 * 1024
_AGENT_SOURCE = Path(wire.__file__).read_bytes()

Event = tuple[str, bytes | dict[str, Any]]


class Sandbox:
    """A running sandbox. Operations name the attempt that they are for; a later attempt ends those of earlier ones."""

    def __init__(self, launch: Launch, backend: Backend, handle: str, link: AgentLink) -> None:
        self.id = launch.sandbox_id
        self.key = launch.key
        self.born = time.monotonic()
        self._backend = backend
        self._handle = handle
        self._folder = launch.folder
        self._link = link
        self._under_way: dict[Operation, int] = {}
        self._stale: set[Operation] = set()
        self._killers: set[asyncio.Task[None]] = set()
        self._removing = False

    @classmethod
    async def launch(cls, backend: Backend, key: RunKey, root: Path) -> "Sandbox":
        """Start a sandbox with its folder under ``root``. Nothing is left behind when it raises."""
        sandbox_id = secrets.token_hex(8)
        folder = root / sandbox_id
        launch = Launch(sandbox_id, key, folder)
        folder.mkdir(mode=0o755, parents=True)
        handle: str | None = None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            (folder / "agent.py").write_bytes(_AGENT_SOURCE)
            _listen(listener, folder)
            async with asyncio.timeout(_START_TIMEOUT_S):
                handle = await backend.create(launch)
                link = await _accept(listener, backend, handle)
        except BaseException as error:
            if handle is not None:
                with contextlib.suppress(SandfleetError, OSError):
                    await backend.destroy(handle)
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, TimeoutError):
                raise HostUnavailable(f"No sandbox started within {_START_TIMEOUT_S:.0f} s.") from error
            if isinstance(error, SandfleetError) and not isinstance(error, SandboxError):
                raise HostUnavailable(f"No sandbox could be started: {error.message}") from error
            raise
        finally:
            listener.close()
            (folder / "agent.sock").unlink(missing_ok=True)
        return cls(launch, backend, handle, link)

    async def serve(self) -> str:
        """Receive from the agent until the sandbox ends; return why it did, in words for the user."""
        reason = await self._link.serve()
        if not self._removing and reason == AgentLink.HUNG_UP:
            reason = await self._backend.why(self._handle)
        self._link.close(reason)
        return self._link.lost().message

    @property
    def loss_told(self) -> bool:
        """Whether somebody waited for an operation when the sandbox ended, and so heard of it."""
        return self._link.told_somebody

    async def destroy(self) -> None:
        """End the sandbox and remove all of it. May raise when the engine does not answer; then call again."""
        self._removing = True
        self._link.close("it was removed")
        await self._backend.destroy(self._handle)
        shutil.rmtree(self._folder, ignore_errors=True)

    def supersede(self, attempt: int) -> None:
        """Kill what still runs for attempts before this one."""
        for operation, owner in self._under_way.items():
            if owner < attempt:
                self._stale.add(operation)
                operation.kill()
                self._expect_end(operation)

    async def exec(
        self, fence: Fence, spec: dict[str, Any], stdin: bytes | None
    ) -> AsyncGenerator[Event, None]:
        """Run a command: yields ``stdout`` and ``stderr`` with bytes, then ``exit`` with the result.

        ``spec`` has ``argv`` or ``shell``, ``timeout_s``, ``output_bytes``, and maybe ``cwd`` and ``env``. Closing
        the iterator early kills the command's process tree.
        """
        spec = {**spec, "stdin": stdin is not None}
        # The agent adds a marker and the end of the stream to what it cut.
        most_bytes = int(spec["output_bytes"]) + 2 * wire.TAIL
        async with self._operation(fence, wire.EXEC, spec, most_bytes) as operation:
            loop = asyncio.get_running_loop()
            backstop = loop.call_later(spec["timeout_s"] + _KILL_TIMEOUT_S, self._overdue, operation)
            feeder = asyncio.create_task(self._feed(operation, stdin)) if stdin is not None else None
            try:
                while (item := await operation.take()) is not None:
                    yield "stdout" if item[0] == wire.STDOUT else "stderr", item[1]
            finally:
                backstop.cancel()
                if feeder is not None:
                    feeder.cancel()
            result = dict(operation.result or {})
            result["dropped_bytes"] += operation.discarded_bytes
            if operation not in self._stale:
                yield "exit", result

    @staticmethod
    async def _feed(operation: Operation, data: bytes) -> None:
        with contextlib.suppress(SandboxError):
            await operation.send(data)
            await operation.send_eof()

    async def read(self, fence: Fence, path: str, offset: int, limit: int) -> AsyncGenerator[bytes, None]:
        """Content of a file in pieces, from ``offset``, at most ``limit`` bytes."""
        spec = {"path": path, "offset": offset, "limit": limit}
        async with self._operation(fence, wire.READ, spec, limit) as operation:
            while (item := await operation.take()) is not None:
                yield item[1]

    async def write(
        self, fence: Fence, path: str, mode: int | None, content: AsyncIterable[bytes]
    ) -> dict[str, Any]:
        """Replace a file and make its directories; the old content stays until all of the new one has come."""
        async with self._operation(fence, wire.WRITE, {"path": path, "mode": mode}, 0) as operation:
            async for part in content:
                await operation.send(part)
                if operation.ended.is_set():
                    break
            await operation.send_eof()
            await operation.take()
            return dict(operation.result or {})

    async def list(self, fence: Fence, path: str) -> dict[str, Any]:
        """Entries of a directory with name, kind, size (bytes), modified_s; ``truncated`` if there are over 10,000."""
        async with self._operation(fence, wire.LIST, {"path": path}, _MAX_LISTING_BYTES) as operation:
            parts = []
            while (item := await operation.take()) is not None:
                parts.append(item[1])
            try:
                entries = [_entry(json.loads(line)) for line in b"".join(parts).splitlines()]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                self._link.close("its agent broke the protocol (a listing that is none)")
                raise self._link.lost() from error
            return {"entries": entries, "truncated": bool((operation.result or {}).get("truncated"))}

    @contextlib.asynccontextmanager
    async def _operation(
        self, fence: Fence, kind: int, spec: dict[str, Any], most_bytes: int
    ) -> AsyncIterator[Operation]:
        operation = await self._link.start(kind, spec, most_bytes)
        self._under_way[operation] = fence.attempt
        try:
            yield operation
            if operation in self._stale:
                raise StaleAttempt("A later attempt of this run has taken the sandbox over.")
        except OperationRefused as refused:
            if refused.code == "unkillable":
                await self._kill_from_outside(refused.message)
                raise self._link.lost() from None
            if operation in self._stale:
                raise StaleAttempt("A later attempt of this run has taken the sandbox over.") from None
            raise
        finally:
            del self._under_way[operation]
            self._stale.discard(operation)
            if not operation.ended.is_set():
                operation.kill()
                self._expect_end(operation)

    def _overdue(self, operation: Operation) -> None:
        """The command's time limit has passed by enough for the agent's own ladder."""
        if operation.ended.is_set():
            return
        if operation.backlog:  # whoever takes the output is too slow, not the agent
            operation.kill()
            self._expect_end(operation)
        else:
            self._in_background(self._kill_from_outside())

    def _expect_end(self, operation: Operation) -> None:
        self._in_background(self._ends_or_dies(operation))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"kill in sandbox {self.id}")
        self._killers.add(task)
        task.add_done_callback(self._killers.discard)

    async def _ends_or_dies(self, operation: Operation) -> None:
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await operation.ended.wait()
            failed = (operation.result or {}).get("code") == "unkillable"
        except TimeoutError:
            failed = True
        if failed:
            await self._kill_from_outside()

    async def _kill_from_outside(self, why: str = "a command in it could not be killed") -> None:
        if not self._removing:
            logger.warning("killing a sandbox from outside", extra={"sandbox": self.id})
            self._link.explain(why)
            await self._backend.kill(self._handle)
            self._link.close("it was killed")


def _listen(listener: socket.socket, folder: Path) -> None:
    """Bind in ``folder`` by a short name: the path of a unix socket has 107 bytes at most."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{directory}/agent.sock")
    finally:
        os.close(directory)
    (folder / "agent.sock").chmod(0o666)  # the folder is private to this user; the sandbox has another uid
    listener.listen(1)
    listener.setblocking(False)


async def _accept(listener: socket.socket, backend: Backend, handle: str) -> AgentLink:
    try:
        async with asyncio.timeout(_START_TIMEOUT_S / 2):
            return await AgentLink.accept(listener)
    except (ProtocolError, TimeoutError) as error:
        raise HostUnavailable(
            f"The agent did not start in its sandbox: {await backend.why(handle)}. "
            "The image needs Python 3.9 or newer as python3."
        ) from error


def _entry(found: dict[str, Any]) -> dict[str, Any]:
    kind = found["kind"] if found["kind"] in ("file", "directory", "symlink") else "other"
    name = str(found["name"]).encode("utf-8", "replace").decode()
    return {"name": name, "kind": kind, "size": int(found["size"]), "modified_s": int(found["modified_s"])}
