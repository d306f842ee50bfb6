"""One sandbox: its folder, its backend process, its agent, and what runs in it for which attempt."""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from sandfleet.fleet.host import metrics
from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.agent_link import AgentLink, Operation
from sandfleet.fleet.host.answers import Answers
from sandfleet.fleet.host.backend import AGENT_NAME, Backend, Launch
from sandfleet.fleet.host.dialling import BACKLOG, come_back
from sandfleet.fleet.host.proxy import Proxy
from sandfleet.fleet.host.results import ProtocolError
from sandfleet.fleet.sandbox.errors import OperationRefused, StaleAttempt
from sandfleet.fleet.sandbox_agent import wire
from sandfleet.shared.errors import HostUnavailable, SandboxError, SandfleetError
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.store.snapshots import Snapshot
from sandfleet.shared.templates import Template

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
# Past its own deadline for a kill the agent has given up or is broken: then the host kills from outside.
_KILL_TIMEOUT_S = wire.KILL_AT_MOST_S + 2.0
_SLOW_KILL_S = (
    1.5  # a kill that takes longer lacks CPU time: 200 processes die in 0.1 s where there is enough
)
_LEND_AGAIN_S = 1.0
_COME_BACK_S = 20.0  # for an agent to find a host that was started again: it looks five times a second
_NAME_AFTER_S = 1.0  # a burst of take-overs needs the engine and the CPUs for itself
_LOOK_TIMEOUT_S = 30.0
# Exits with 0 if there are no processes but itself, those above it, and the agent.
_OTHERS = """
import os, sys
known, pid = {1}, os.getpid()
while pid > 1:
    known.add(pid)
    with open(f"/proc/{pid}/stat") as file:
        pid = int(file.read().rpartition(")")[2].split()[1])
sys.exit(any(name.isdigit() and int(name) not in known for name in os.listdir("/proc")))
"""

Event = tuple[str, bytes | dict[str, Any]]


class Sandbox:
    """A running sandbox. Operations name the attempt that they are for; a later attempt ends those of earlier ones."""

    def __init__(
        self,
        launch: Launch,
        backend: Backend,
        handle: str,
        link: AgentLink,
        *,
        proxy: Proxy,
        secret: str,
    ) -> None:
        self.id = launch.sandbox_id
        self.key = launch.key
        self.template = launch.template
        self.born = time.monotonic()
        self.made_for = 0
        """The attempt that it was made for."""
        self.asked = 0
        """Calls for it so far."""
        self.restored: Snapshot | None = None
        """What its workspace began with."""
        self.secret = secret
        """By which its agent is known again when this host was started again."""
        self._backend = backend
        self.handle = handle
        self._folder = launch.folder
        self._link = link
        self._proxy = proxy
        self._answers = Answers()
        self._attempt = 0  # the latest that spoke
        self._under_way: dict[Operation, int] = {}
        self._used_at = self.born
        self._stale: set[Operation] = set()
        self._killers: set[asyncio.Task[None]] = set()
        self._killing: asyncio.Task[None] | None = None
        self._slow_kills = 0
        self._removing = False

    @classmethod
    async def launch(
        cls, backend: Backend, key: RunKey | None, root: Path, agent: AgentFiles, template: Template
    ) -> "Sandbox":
        """Start a sandbox with its folder under ``root``, for nobody yet without a ``key``.

        Nothing is left behind when it raises.
        """
        sandbox_id = secrets.token_hex(8)
        folder = root / sandbox_id
        launch = Launch(sandbox_id, key, folder, template)
        folder.mkdir(mode=0o755, parents=True)
        handle: str | None = None
        proxy = Proxy(sandbox_id, template.domains)
        secret = secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            agent.place(folder / AGENT_NAME)
            _listen(listener, folder)
            await proxy.open(folder)
            async with asyncio.timeout(_START_TIMEOUT_S):
                handle = await backend.create(launch)
                link = await _accept(listener, backend, handle, secret)
        except BaseException as error:
            if handle is not None:
                with contextlib.suppress(SandfleetError, OSError):
                    await backend.destroy(handle)
            await proxy.close()
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, TimeoutError):
                raise HostUnavailable(f"No sandbox started within {_START_TIMEOUT_S:.0f} s.") from error
            if isinstance(error, SandfleetError) and not isinstance(error, SandboxError):
                raise HostUnavailable(f"No sandbox could be started: {error.message}") from error
            raise
        finally:
            listener.close()
            (folder / "agent.sock").unlink(missing_ok=True)
        return cls(launch, backend, handle, link, proxy=proxy, secret=secret)

    @classmethod
    async def adopt(cls, backend: Backend, launch: Launch, handle: str, secret: str) -> "Sandbox | None":
        """Take over a sandbox that an earlier life of this host has left; None if it, or its agent, does not answer."""
        if not await backend.adopt(launch, handle):
            return None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        proxy = Proxy(launch.sandbox_id, launch.template.domains)
        link: AgentLink | None = None
        try:
            await proxy.open(launch.folder)
            (launch.folder / "agent.sock").unlink(missing_ok=True)
            _listen(listener, launch.folder, BACKLOG)
            async with asyncio.timeout(_COME_BACK_S):
                link = await come_back(listener, secret, backend.patience_s)
            return cls(launch, backend, handle, link, proxy=proxy, secret=secret)
        except (TimeoutError, OSError):
            return None
        finally:
            if link is None:
                await proxy.close()
            listener.close()
            (launch.folder / "agent.sock").unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        """Whether operations can begin."""
        return self._link.alive

    async def freeze(self) -> bool:
        """Stop everything in it until ``thaw``; false if that failed. For one that belongs to nobody yet."""
        return await self._backend.freeze(self.handle)

    async def thaw(self) -> bool:
        """Let it go on; false if that failed."""
        return await self._backend.thaw(self.handle)

    def belong_to(self, key: RunKey) -> None:
        """It is this run's from now on, and its life begins."""
        self.key = key
        self.born = self._used_at = time.monotonic()
        self._in_background(self._name_run(key))

    async def _name_run(self, key: RunKey) -> None:
        await asyncio.sleep(_NAME_AFTER_S)
        if self.alive and not self._removing:
            await self._backend.name_run(self.handle, self.id, key)

    async def serve(self) -> str:
        """Receive from the agent until the sandbox ends; return why it did, in words for the user."""
        reason = await self._link.serve()
        if not self._removing and reason == AgentLink.HUNG_UP:
            reason = await self._backend.why(self.handle)
        self._link.close(reason)
        return self._link.lost().message

    @property
    def loss_told(self) -> bool:
        """Whether somebody waited for an operation when the sandbox ended, and so heard of it."""
        return self._link.told_somebody

    def idle_s(self) -> float:
        """Seconds since the end of its last operation; 0 while one is under way."""
        return 0.0 if self.busy else time.monotonic() - self._used_at

    async def runs_something(self, fence: Fence) -> bool:
        """Whether there are processes in it besides its agent: background processes, and what commands have left."""
        argv = ["python3", "-I", "-S", "-c", _OTHERS]
        spec = {"argv": argv, "timeout_s": _LOOK_TIMEOUT_S, "output_bytes": 1024}
        result: Any = None
        async for event, data in self.exec(fence, spec, None):
            result = data if event == "exit" else result
        return not (result is not None and result["exit_code"] == 0)

    async def destroy(self) -> None:
        """End the sandbox and remove all of it. May raise when the engine does not answer; then call again."""
        self._removing = True
        self._link.close("it was removed")
        await self._backend.destroy(self.handle)
        await self._proxy.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def busy(self) -> bool:
        """Whether anything is under way in it, but for background processes."""
        return bool(self._under_way)

    def supersede(self, attempt: int) -> None:
        """Kill what still runs for attempts before this one, also what lost its caller with an earlier life of the host."""
        self._attempt = max(self._attempt, attempt)
        self._link.forget({"before": attempt})
        for operation, owner in self._under_way.items():
            if owner < attempt:
                self._stale.add(operation)
                operation.kill()
                self._expect_end(operation)

    async def exec(
        self, fence: Fence, spec: dict[str, Any], stdin: bytes | None
    ) -> AsyncGenerator[Event, None]:
        """Run a command: yields ``stdout`` and ``stderr`` with bytes, then ``exit`` with the result.

        ``spec`` as for ``command``. Closing the iterator early kills the command's process tree.
        """
        async with self.command(fence, {**spec, "stdin": stdin is not None}) as command:
            feeder = asyncio.create_task(_feed(command, stdin)) if stdin is not None else None
            try:
                async for event in self.events(command):
                    yield event
            finally:
                if feeder is not None:
                    feeder.cancel()

    @contextlib.asynccontextmanager
    async def command(self, fence: Fence, spec: dict[str, Any]) -> AsyncIterator[Operation]:
        """A command under way, whose events ``events`` gives; leaving early kills its process tree.

        ``spec`` has ``argv`` or ``shell``, ``timeout_s``, ``output_bytes``, and maybe ``cwd``, ``env``, ``stdin``
        (whether content will be sent) and ``pty`` (rows, columns). One with a ``name`` outlives this host for a while,
        and the same name with ``resume`` (bytes of ``stdout`` and ``stderr`` that are known) follows it again.
        """
        if (name := spec.get("name")) is not None:
            spec = {**spec, "name": f"{fence.attempt}.{name}", "attempt": fence.attempt}
        # The agent adds a marker and the end of the stream to what it cut.
        most_bytes = int(spec["output_bytes"]) + 2 * wire.TAIL
        async with self.operation(fence, wire.EXEC, spec, most_bytes) as operation:
            loop = asyncio.get_running_loop()
            timers = (
                loop.call_later(spec["timeout_s"] + _SLOW_KILL_S, self._hasten, operation),
                loop.call_later(spec["timeout_s"] + _KILL_TIMEOUT_S, self._overdue, operation),
            )
            try:
                yield operation
            finally:
                for timer in timers:
                    timer.cancel()
                if name is not None and operation.ended.is_set():
                    self._link.forget_soon(spec["name"])
                elif name is not None:
                    self._link.forget({"name": spec["name"]})

    async def events(self, command: Operation) -> AsyncGenerator[Event, None]:
        """``stdout`` and ``stderr`` of a command with bytes, then ``exit`` with the result."""
        while (item := await command.take()) is not None:
            yield "stdout" if item[0] == wire.STDOUT else "stderr", item[1]
        result = dict(command.result or {})
        result["dropped_bytes"] += command.discarded_bytes
        if rung := result["kill_rung"]:
            metrics.KILLS.labels(str(rung)).inc()
        if command not in self._stale:
            yield "exit", result

    async def ask(self, fence: Fence, kind: int, spec: dict[str, Any]) -> dict[str, Any]:
        """An operation without content: its result."""
        async with self.operation(fence, kind, spec) as operation:
            await operation.take()
            return dict(operation.result or {})

    async def give(
        self, fence: Fence, kind: int, spec: dict[str, Any], content: AsyncIterable[bytes]
    ) -> dict[str, Any]:
        """An operation that takes content, as fast as the agent does: its result."""
        async with self.operation(fence, kind, spec) as operation:
            async for part in content:
                await operation.send(part)
                if operation.ended.is_set():
                    break
            await operation.send_eof()
            await operation.take()
            return dict(operation.result or {})

    async def ask_lines(
        self, fence: Fence, kind: int, spec: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """An operation that answers in lines of JSON: them, and its result."""
        async with (
            self._answers.slot(),
            self.operation(fence, kind, spec, wire.MAX_LINES_BYTES) as operation,
        ):
            try:
                found = await self._answers.read(operation)
            except ProtocolError as error:
                self._link.close(f"its agent broke the protocol ({error})")
                raise self._link.lost() from error
            return found, dict(operation.result or {})

    @contextlib.asynccontextmanager
    async def operation(
        self, fence: Fence, kind: int, spec: dict[str, Any], most_bytes: int = 0
    ) -> AsyncIterator[Operation]:
        """An operation for an attempt, which may return ``most_bytes`` of content; leaving early ends it.

        StaleAttempt if a later attempt has spoken, be it since the caller was let in or while this goes on.
        """
        if fence.attempt < self._attempt:
            raise StaleAttempt("A later attempt of this run has taken the sandbox over.")
        operation = self._link.begin(kind, spec, most_bytes)
        # Before anything is awaited: a later attempt must find it here.
        self._under_way[operation] = fence.attempt
        try:
            await self._link.flushed()
            yield operation
            if operation in self._stale:
                raise StaleAttempt("A later attempt of this run has taken the sandbox over.")
        except OperationRefused as refused:
            if refused.code == "unkillable":
                await self.kill_from_outside(refused.message)
                raise self._link.lost() from None
            if operation in self._stale:
                raise StaleAttempt("A later attempt of this run has taken the sandbox over.") from None
            raise
        finally:
            del self._under_way[operation]
            self._used_at = time.monotonic()
            self._stale.discard(operation)
            if not operation.ended.is_set():
                operation.kill()
                self._expect_end(operation)

    def _hasten(self, operation: Operation) -> None:
        """The agent is still killing the command some time after its limit."""
        if not operation.ended.is_set() and not operation.backlog:
            self._in_background(self._lend_cpu(operation))

    async def _lend_cpu(self, operation: Operation) -> None:
        """Give the sandbox a whole CPU until what is being killed has ended: to die takes CPU time too."""
        self._slow_kills += 1
        try:
            await self._backend.lend_cpu(self.handle, lend=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await operation.ended.wait()
        finally:
            self._slow_kills -= 1
            if not self._slow_kills:
                await self._take_cpu_back()

    async def _take_cpu_back(self) -> None:
        """Until the engine has done it, somebody else kills slowly, or the sandbox goes: else it would keep a whole CPU."""
        while not await self._backend.lend_cpu(self.handle, lend=False):
            await asyncio.sleep(_LEND_AGAIN_S)
            if self._slow_kills or self._removing:
                return

    def _overdue(self, operation: Operation) -> None:
        """The command's time limit has passed by enough for the agent's own ladder."""
        if operation.ended.is_set():
            return
        if operation.backlog:  # whoever takes the output is too slow, not the agent
            operation.kill()
            self._expect_end(operation)
        else:
            self._in_background(self.kill_from_outside())

    def _expect_end(self, operation: Operation) -> None:
        self._in_background(self._ends_or_dies(operation))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"kill in sandbox {self.id}")
        self._killers.add(task)
        task.add_done_callback(self._killers.discard)

    async def _ends_or_dies(self, operation: Operation) -> None:
        asyncio.get_running_loop().call_later(_SLOW_KILL_S, self._hasten, operation)
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await operation.ended.wait()
            failed = (operation.result or {}).get("code") == "unkillable"
        except TimeoutError:
            failed = True
        if failed:
            await self.kill_from_outside()

    async def kill_from_outside(self, why: str = "a command in it could not be killed") -> None:
        """Freeze and kill everything in it, once, without the agent; ``why`` is what users hear of the loss."""
        if self._killing is None:
            self._killing = asyncio.create_task(self._freeze_and_kill(why), name=f"kill sandbox {self.id}")
        await asyncio.shield(self._killing)

    async def _freeze_and_kill(self, why: str) -> None:
        if not self._removing:
            logger.warning("killing a sandbox from outside", extra={"sandbox": self.id})
            self._link.explain(why)
            if exhausted := await self._backend.exhausted(self.handle):
                self._link.explain(f"it ran out of {exhausted}, and {why}")
            await self._backend.kill(self.handle)
            metrics.KILLS.labels("3").inc()
            self._link.close("it was killed")


async def _feed(command: Operation, data: bytes) -> None:
    with contextlib.suppress(SandboxError):
        await command.send(data)
        await command.send_eof()


def _listen(listener: socket.socket, folder: Path, backlog: int = 1) -> None:
    """Bind in ``folder`` by a short name: the path of a unix socket has 107 bytes at most."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{directory}/agent.sock")
    finally:
        os.close(directory)
    (folder / "agent.sock").chmod(0o666)  # the folder is private to this user; the sandbox has another uid
    listener.listen(backlog)
    listener.setblocking(False)


async def _accept(listener: socket.socket, backend: Backend, handle: str, secret: str) -> AgentLink:
    try:
        async with asyncio.timeout(_START_TIMEOUT_S / 2):
            return await AgentLink.accept(listener, secret, patience_s=backend.patience_s)
    except (ProtocolError, TimeoutError) as error:
        raise HostUnavailable(
            f"The agent did not start in its sandbox: {await backend.why(handle)}. "
            "The image needs Python 3.9 or newer as python3."
        ) from error
