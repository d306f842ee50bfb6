"""The sandbox of one run, as the executor and its tools see it."""

import asyncio
import base64
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from sandfleet.fleet.sandbox import metrics
from sandfleet.fleet.sandbox.attached import AttachedCommand
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import NoSandbox, OperationRefused, SandboxLost, TemplateUnavailable
from sandfleet.fleet.sandbox.files import SandboxFiles
from sandfleet.fleet.sandbox.hosts import Hosts, Placed
from sandfleet.fleet.sandbox.processes import SandboxProcesses
from sandfleet.fleet.sandbox_agent.wire import RESUME_S
from sandfleet.shared import tracing
from sandfleet.shared.errors import HostAway, HostBroke, HostUnavailable, NoRoom, SandboxError, SandfleetError
from sandfleet.shared.ids import Fence
from sandfleet.shared.sandbox_token import SandboxTokenExpired
from sandfleet.shared.templates import DEFAULT

_HOST_PATIENCE_S = 5.0  # a host that restarts or is full for a moment costs a pause, not a failed tool call
_ROOM_PATIENCE_S = 1.0
_HOST_PAUSE_S = 0.25
_LOOP_PATIENCE_S = 60.0  # beyond what a graph that blocks the loop for a while costs its neighbours
_RESTARTED = "The sandbox was lost: its host is gone or has restarted."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. Exactly one of ``exit_code`` and ``signal`` is set.

    ``stdout`` and ``stderr`` are what was kept; if ``truncated``, a marker stands where ``dropped_bytes`` were
    dropped. A command over its time limit was killed with all it had started, and is ``timed_out``.
    ``out_of_memory``: the kernel killed a process of it for memory, or, with several commands at once, nobody knows that
    it was another's; then the limit and the peak are known unless the machine's kernel does not tell.
    """

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool
    dropped_bytes: int
    out_of_memory: bool
    memory_limit_bytes: int | None
    memory_peak_bytes: int | None
    duration_ms: int


class RunSandbox:
    """The sandbox of one run and attempt, created at its first use. ``files`` and ``processes`` do the rest in it.

    All methods raise SandboxError with a message fit for the model, and Superseded once a later attempt has taken
    the run. After a loss one call fails with SandboxLost, which says what the next finds: an empty sandbox, or the files
    of the latest snapshot.
    """

    def __init__(
        self,
        fence: Fence,
        sign_token: Callable[[], Awaitable[str]],
        hosts: Hosts,
        wait_for_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``sign_token`` gives a token for ``fence`` that is valid now, and waits until it can; what it raises ends the
        call. ``wait_for_room`` is called when no host has room: it may break the run off; if it returns, NoRoom is raised.
        """
        self.fence = fence
        self._sign_token = sign_token
        self._hosts = hosts
        self._wait_for_room = wait_for_room
        self._placed: Placed | None = None
        self._acquired = self._had_one = False
        self._counts = True  # in the metrics
        self._used = False
        self._told_of_loss = False
        self._to_know: str | None = None
        self._untold: SandboxLost | None = None
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._template = DEFAULT
        self.files = SandboxFiles(self._use)
        self.processes = SandboxProcesses(self._use)

    def choose_template(self, name: str) -> None:
        """Make the run's sandbox from this template of ``sandfleet.toml``; for graphs, before they first use it.

        A run that has a sandbox already, of an earlier attempt say, keeps it. Raises SandboxError after the first use.
        """
        if self._used and name != self._template:
            raise SandboxError("The template of a sandbox can be chosen before its first use only.")
        self._template = name

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command: a text for the shell, or a list of arguments.

        ``cwd`` defaults to /workspace and ``timeout_s`` to SANDFLEET_SANDBOX_COMMAND_TIMEOUT_S. ``on_output`` gets
        ``stdout`` or ``stderr`` and each piece as it comes. Cancelling kills the command's process tree.
        """
        request: dict[str, Any] = {
            "command": command if isinstance(command, str) else list(command),
            "cwd": cwd,
            "env": dict(env or {}),
            "timeout_s": timeout_s,
            "stdin": None if stdin is None else base64.b64encode(stdin).decode(),
            "name": uuid.uuid4().hex,
        }
        kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        sent = False

        async def run(client: SandboxClient, token: str) -> dict[str, Any]:
            nonlocal sent
            known = {name: sum(map(len, pieces)) for name, pieces in kept.items()}
            asked, sent = ({**request, "resume": known} if sent else request), True
            try:
                async with aclosing(client.exec(token, asked, timeout_s)) as events:
                    async for event in events:
                        if event["event"] == "exit":
                            return event
                        kept[event["event"]].append(event["data"])
                        if on_output is not None:
                            on_output(event["event"], event["data"])
            except (HostAway, SandboxTokenExpired):
                sent = "resume" in asked  # it was not begun
                raise
            raise HostBroke("The sandbox host ended the command's output early.")

        with metrics.executing(), tracing.span("sandbox exec") as span:
            ended = await self._followed(run)
            span.set("sandfleet.exit_code", -1 if ended["exit_code"] is None else ended["exit_code"])
            span.set("sandfleet.timed_out", ended["timed_out"])
        return ExecResult(
            exit_code=ended["exit_code"],
            signal=ended["signal"],
            stdout=b"".join(kept["stdout"]),
            stderr=b"".join(kept["stderr"]),
            truncated=ended["dropped_bytes"] > 0,
            timed_out=ended["timed_out"],
            dropped_bytes=ended["dropped_bytes"],
            out_of_memory=ended["out_of_memory"],
            memory_limit_bytes=ended["memory_limit_bytes"],
            memory_peak_bytes=ended["memory_peak_bytes"],
            duration_ms=ended["duration_ms"],
        )

    async def attach(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> AttachedCommand:
        """Start a command to speak with while it runs; ``terminal`` gives it one of so many rows and columns.

        ``async with await sandbox.attach("bash", terminal=(24, 80)) as shell: …``
        """
        request = {
            "command": command if isinstance(command, str) else list(command),
            "cwd": cwd,
            "env": dict(env or {}),
            "timeout_s": timeout_s,
            "stdin": True,
            "pty": None if terminal is None else {"rows": terminal[0], "columns": terminal[1]},
        }
        return await self._use(lambda client, token: client.attach(token, request))

    async def read_file(self, path: str, *, offset: int = 0, limit: int = 16 * 1024 * 1024) -> bytes:
        """Content of a file under /workspace or /tmp from ``offset``, at most ``limit`` bytes."""
        return await self._use(lambda client, token: client.read(token, path, offset, limit))

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Replace a file under /workspace or /tmp and make its directories; readers see the old or the new file."""
        await self._use(lambda client, token: client.write(token, path, data, mode))

    async def list_files(self, path: str = "/workspace") -> dict[str, Any]:
        """``entries`` of a directory (name, kind, size in bytes, modified_s) and whether they are ``truncated``."""
        return await self._use(lambda client, token: client.list(token, path))

    async def snapshot(self, reason: str = "request") -> dict[str, Any] | None:
        """Keep the workspace as it is: ``snapshot_id``, ``bytes``, ``files``, ``skipped``; None if the run has no sandbox.

        ``reason``: ``request``, or ``interrupt`` for whichever run resumes this one.
        """
        if not self._had_one and (self.fence.attempt == 1 or not await self._hosts.known(self.fence)):
            return None
        return await self._use(lambda client, token: client.snapshot(token, reason))

    def from_thread(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work`` with this sandbox for code in another thread than the graphs' event loop, and wait for it here.

        Raises what ``work`` raises, and SandboxError when the event loop waits for this thread itself.
        """
        begun = threading.Event()

        async def begin() -> T:
            begun.set()
            return await work()

        if threading.get_ident() != self._thread:
            future = asyncio.run_coroutine_threadsafe(begin(), self._loop)
            if begun.wait(_LOOP_PATIENCE_S) or not future.cancel():
                return future.result()
        raise SandboxError(
            "The sandbox cannot be used here: the event loop that it needs waits for this code. In async nodes use the "
            "async methods, and await graphs (ainvoke)."
        )

    async def close(self) -> None:
        """Remove the sandbox if this attempt used one. Never raises: what fails here the host reaps."""
        if self._used and self._placed is not None:
            self._used = False
            self._hold(False)
            with suppress(SandfleetError, TimeoutError, OSError):
                await self._placed.client.remove(await self._sign_token())

    def leave(self) -> None:
        """The run is over here, whoever has the sandbox now."""
        if self._acquired and self._counts:
            metrics.held(-1)
        self._counts = False

    async def ready(self) -> None:
        """Get a sandbox before something begins that needs it. What fails is raised by the use that follows."""
        try:
            async with self._lock:
                if not self._acquired:
                    await self._acquire()
        except SandboxLost as lost:
            self._untold = lost
        except (SandboxError, TimeoutError):
            return

    async def _use(self, call: Callable[[SandboxClient, str], Awaitable[T]]) -> T:
        try:
            async with self._lock:
                if self._untold is not None:
                    lost, self._untold = self._untold, None
                    raise lost
                if not self._acquired:
                    await self._acquire()
                if self._to_know is not None:
                    await self._hosts.know(self.fence, self._to_know)
                    self._to_know = None
                assert self._placed is not None
                client = self._placed.client
            return await self._signed(client, call)
        except _Replaced:
            raise
        except NoSandbox as error:
            raise await self._replace(_RESTARTED) from error
        except SandboxLost as error:
            raise await self._replace(error.message) from error
        except TimeoutError as error:
            raise HostUnavailable("The sandbox host did not answer in time.") from error

    def _hold(self, acquired: bool) -> None:
        if self._counts and acquired is not self._acquired:
            metrics.held(1 if acquired else -1)
        self._acquired = acquired

    async def _replace(self, lost: str) -> SandboxLost:
        """Make the next sandbox at once, if that can be, to say what is in it."""
        async with self._lock:
            self._hold(False)
            self._told_of_loss = True
            restored = None
            if self._used:  # not closed meanwhile: nobody would remove it
                with suppress(SandboxError):
                    try:
                        restored = (await self._acquire())["restored"]
                    except SandboxLost as error:
                        return error
            return _Replaced(lost, restored)

    async def _followed(
        self, run: Callable[[SandboxClient, str], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """A command that outlives its host: when that breaks off and comes back, the command is followed again."""
        broke: HostBroke | None = None
        patient_until = 0.0
        while True:
            try:
                return await self._use(run)
            except HostBroke as error:
                broke, patient_until = error, time.monotonic() + RESUME_S
            except HostUnavailable:  # not there yet, or not ready
                if broke is None or time.monotonic() > patient_until:
                    raise
                await asyncio.sleep(_HOST_PAUSE_S)
            except OperationRefused as error:
                if error.code != "no_command":
                    raise
                raise HostBroke(
                    "The sandbox host was away while the command ran, and the command's end is not known: it was killed, "
                    "or had never begun. The sandbox and its files are there."
                ) from error

    async def _signed(self, client: SandboxClient, call: Callable[[SandboxClient, str], Awaitable[T]]) -> T:
        patient_until = time.monotonic() + _HOST_PATIENCE_S
        while True:
            try:
                return await self._signed_once(client, call)
            except HostAway:  # it restarts, and was not asked: it may be asked again
                if time.monotonic() > patient_until:
                    self._hold(False)  # the next use asks where the sandbox is
                    raise
                await asyncio.sleep(_HOST_PAUSE_S)

    async def _signed_once(
        self, client: SandboxClient, call: Callable[[SandboxClient, str], Awaitable[T]]
    ) -> T:
        try:
            return await call(client, await self._sign_token())
        except SandboxTokenExpired:
            # On its way to the host, which has done nothing. The next one is of a renewed lease.
            return await call(client, await self._sign_token())

    async def _acquire(self) -> dict[str, Any]:
        with metrics.acquiring(), tracing.span("sandbox acquire") as span:
            placed, acquired = await self._find_one()
            span.set("sandfleet.host_id", placed.host_id)
            span.set("sandfleet.sandbox_id", acquired["sandbox_id"])
        self._begin_with(placed, acquired)
        return acquired

    async def _find_one(self) -> tuple[Placed, dict[str, Any]]:
        """A host that has a sandbox for the run, and its answer."""
        begun = time.monotonic()
        refused: set[str] = set()
        full: NoRoom | None = None
        unable: TemplateUnavailable | None = None
        while True:
            try:
                placed = await self._hosts.place(self.fence, self._template, refused, self._sign_token)
                self._placed, self._used = placed, True  # also when the answer is lost
                return placed, await self._acquire_at(placed, begun + _HOST_PATIENCE_S)
            except _Refused as refusal:
                if isinstance(refusal.why, NoRoom):
                    full = refusal.why
                elif isinstance(refusal.why, TemplateUnavailable):
                    unable = refusal.why
                if refusal.host_id not in refused:
                    refused.add(refusal.host_id)
                    continue
                if not isinstance(refusal.why, NoRoom):  # and there is no other host
                    raise refusal.why from None
            except NoRoom as error:
                if unable is not None and full is None:  # to wait for room would help nobody
                    raise unable from None
                full = error
            except HostUnavailable:
                if time.monotonic() > begun + _HOST_PATIENCE_S:
                    raise
                await asyncio.sleep(_HOST_PAUSE_S)
                continue
            if time.monotonic() > begun + _ROOM_PATIENCE_S:
                if self._wait_for_room is not None:
                    await self._wait_for_room()
                assert full is not None
                raise full
            refused.clear()
            full = unable = None
            await asyncio.sleep(_HOST_PAUSE_S)

    async def _acquire_at(self, placed: Placed, patient_until: float) -> dict[str, Any]:
        """Ask one host. Raises _Refused if it has no room, cannot make the template, or does not answer for as long as there is
        patience."""
        while True:
            try:
                return await self._signed_once(
                    placed.client, lambda client, token: client.acquire(token, self._template)
                )
            except TemplateUnavailable as error:
                raise _Refused(placed.host_id, error) from error
            except HostUnavailable as error:
                if isinstance(error, NoRoom) or time.monotonic() > patient_until:
                    raise _Refused(placed.host_id, error) from error
                await asyncio.sleep(_HOST_PAUSE_S)

    def _begin_with(self, placed: Placed, acquired: dict[str, Any]) -> None:
        """Use the sandbox that the host has given. Raises SandboxLost, once, if it is not the one that the run knew."""
        self._hold(True)
        self._had_one = True
        sandbox_id: str = acquired["sandbox_id"]
        if placed.sandbox_id != sandbox_id:
            # It is noted at the next use: if this executor dies before it has told of a loss, the next one has to.
            self._to_know = sandbox_id
        lost: str | None = acquired["lost"]
        if lost is None and not self._told_of_loss and placed.sandbox_id not in (None, sandbox_id):
            lost = _RESTARTED
        self._told_of_loss = lost is not None
        if lost is not None:
            raise _Replaced(lost, acquired["restored"])


class _Replaced(SandboxLost):
    """The run has a new sandbox, and is told what is in it."""

    def __init__(self, reason: str, restored: dict[str, Any] | None) -> None:
        metrics.lost()
        if restored is None:
            what = "Its files and processes are gone; the next use finds an empty sandbox."
        else:
            what = (
                "Its processes are gone, and its files are again as in the snapshot "
                f"{restored['snapshot_id']} of {restored['created_at']}."
            )
        super().__init__(f"{reason} {what}")
        self.reason = reason
        self.files_kept = restored is not None and restored["reason"] == "drain"


class _Refused(Exception):
    """A host has no room, does not answer, or cannot make the template."""

    def __init__(self, host_id: str, why: HostUnavailable | TemplateUnavailable) -> None:
        super().__init__(host_id)
        self.host_id = host_id
        self.why = why


current_sandbox: ContextVar[RunSandbox] = ContextVar("sandfleet_current_sandbox")
"""The sandbox of the run that the current task works for; set by the executor."""


def running_sandbox() -> RunSandbox:
    """The sandbox of the run that the current code works for. Raises SandboxError where no executor runs it."""
    sandbox = current_sandbox.get(None)
    if sandbox is None:
        raise SandboxError(
            "There is no sandbox here: sandbox tools work in runs that a sandfleet executor executes."
        )
    return sandbox
