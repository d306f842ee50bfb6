"""The same client for code that has no event loop: scripts, notebooks, threads.

from sandfleet.fleet.sandbox_client.blocking import SandboxApi

with SandboxApi("http://127.0.0.1:8123", "sf_…") as api, api.create() as sandbox:
    result = sandbox.exec("echo hello")
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from sandfleet.fleet import sandbox_client as awaited

_ANSWER_S = 180.0

P = ParamSpec("P")
T = TypeVar("T")
Twin = TypeVar("Twin")
Made = TypeVar("Made", bound="_Waiting[Any]")


class _Loop:
    """An event loop in a thread of its own: the caller's thread may have one that runs, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandfleet client", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What it gives. Whoever is interrupted meanwhile (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _Waiting(Generic[Twin]):
    """Does what its twin does, and waits for it."""

    def __init__(self, loop: _Loop, twin: Twin) -> None:
        self._loop = loop
        self._twin = twin


class _Field(Generic[T]):
    """An attribute of the twin, as it is now."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, waiting: _Waiting[Any], owner: type) -> T:
        value: T = getattr(waiting._twin, self._name)
        return value


def _waits(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Waiting[Any], P], T]:
    @wraps(method)
    def wait(self: _Waiting[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.wait(method(self._twin, *args, **kwargs))

    return wait


def _makes(
    made: Callable[[_Loop, Any], Made], method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Any]]
) -> Callable[Concatenate[_Waiting[Any], P], Made]:
    @wraps(method)
    def wait(self: _Waiting[Any], /, *args: P.args, **kwargs: P.kwargs) -> Made:
        return made(self._loop, self._loop.wait(method(self._twin, *args, **kwargs)))

    return wait


def _gives(
    method: Callable[Concatenate[Any, P], AsyncGenerator[bytes]],
) -> Callable[Concatenate[_Waiting[Any], P], Iterator[bytes]]:
    @wraps(method)
    def pieces(self: _Waiting[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[bytes]:
        found = method(self._twin, *args, **kwargs)

        async def following() -> bytes | None:
            return await anext(found, None)

        async def end() -> None:
            await found.aclose()

        try:
            while (piece := self._loop.wait(following())) is not None:
                yield piece
        finally:
            self._loop.wait(end())

    return pieces


class Process(_Waiting[awaited.Process]):
    """A background process; as `sandbox_client.Process`, whose methods have the documentation."""

    process = _Field[int]()
    offset = _Field[int]()
    lost_bytes = _Field[int]()
    exit_code = _Field[int | None]()
    signal = _Field[int | None]()

    output = _gives(awaited.Process.output)
    state = _waits(awaited.Process.state)
    write = _waits(awaited.Process.write)
    resize = _waits(awaited.Process.resize)
    send_signal = _waits(awaited.Process.send_signal)
    kill = _waits(awaited.Process.kill)


class Sandbox(_Waiting[awaited.Sandbox]):
    """A sandbox; ``with`` deletes it at the end. As `sandbox_client.Sandbox`, whose methods have the documentation.

    ``on_output`` of ``exec`` is called in the client's thread.
    """

    sandbox_id = _Field[str]()
    template = _Field[str]()
    generation = _Field[int]()
    metadata = _Field[dict[str, Any]]()
    expires_at = _Field[str]()

    exec = _waits(awaited.Sandbox.exec)
    start = _makes(Process, awaited.Sandbox.start)
    processes = _waits(awaited.Sandbox.processes)
    read_file = _waits(awaited.Sandbox.read_file)
    read_pieces = _gives(awaited.Sandbox.read_pieces)
    write_file = _waits(awaited.Sandbox.write_file)
    list_files = _waits(awaited.Sandbox.list_files)
    stat = _waits(awaited.Sandbox.stat)
    remove = _waits(awaited.Sandbox.remove)
    snapshot = _waits(awaited.Sandbox.snapshot)
    restore = _waits(awaited.Sandbox.restore)
    live = _waits(awaited.Sandbox.live)
    delete = _waits(awaited.Sandbox.delete)

    def fork(self, **wish: Any) -> "Sandbox":
        """A new sandbox with the files of this one."""
        return Sandbox(self._loop, self._loop.wait(self._twin.fork(**wish)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()


class SandboxApi(_Waiting[awaited.SandboxApi]):
    """The API's sandboxes. All methods raise ApiError, and httpx.HTTPError when the API does not answer."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float = _ANSWER_S) -> None:
        super().__init__(_Loop(), awaited.SandboxApi(url, api_key, timeout_s=timeout_s))

    create = _makes(Sandbox, awaited.SandboxApi.create)
    get = _makes(Sandbox, awaited.SandboxApi.get)
    search = _waits(awaited.SandboxApi.search)
    snapshots = _waits(awaited.SandboxApi.snapshots)

    def close(self) -> None:
        """Close all connections; sandboxes stay."""
        try:
            self._loop.wait(self._twin.aclose())
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
