"""One sandbox, as a caller of the API uses it."""

import base64
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from sandfleet.fleet.sandbox_client.errors import ApiError, SandboxLost, told
from sandfleet.fleet.sandbox_client.process import Process
from sandfleet.fleet.sandbox_client.wire import Params, Wire, events

Command = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended: exactly one of ``exit_code`` and ``signal`` is set. Of too much output the middle is missing,
    ``dropped_bytes`` of it."""

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    out_of_memory: bool
    dropped_bytes: int
    duration_ms: int

    @property
    def text(self) -> str:
        """stdout as text."""
        return self.stdout.decode("utf-8", "replace")


class Sandbox:
    """A sandbox; ``async with`` deletes it at the end. Paths lie under /workspace or /tmp; relative ones in /workspace.

    All methods raise ApiError. When the sandbox was lost or begun anew, one call raises SandboxLost, which says what is in
    it now; the next one works there.
    """

    def __init__(self, wire: Wire, found: dict[str, Any]) -> None:
        self._wire = wire
        self.sandbox_id: str = found["sandbox_id"]
        self.template: str = found["template"]
        self.generation: int = found["generation"]
        self.metadata: dict[str, Any] = found["metadata"]
        self.expires_at: str = found["expires_at"]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command: a text for the shell, or a list of arguments. ``on_output`` gets ``stdout`` or ``stderr`` and each
        piece as it comes. Cancelling kills it with all that it has started."""
        body = {
            **_command(command, cwd, env),
            "stdin": None if stdin is None else base64.b64encode(stdin).decode(),
            "timeout_s": timeout_s,
            "encoding": "base64",
        }
        kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        async with self.open("POST", "/exec/stream", body) as response, aclosing(events(response)) as found:
            async for name, data, _ in found:
                if name == "error":
                    raise self.noted(told(data))
                if name in kept:
                    piece = base64.b64decode(data["data"])
                    kept[name].append(piece)
                    if on_output is not None:
                        on_output(name, piece)
                elif name == "exit":
                    output = {key: b"".join(pieces) for key, pieces in kept.items()}
                    fields = {**data, **output}
                    return ExecResult(**{key: fields[key] for key in ExecResult.__dataclass_fields__})
        raise ApiError(502, "broken", "The API ended the command's output early: how it ended is not known.")

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        terminal: tuple[int, int] | None = None,
        hold: bool = False,
    ) -> Process:
        """Start a command in the background. ``terminal`` gives it one of so many rows and columns; with ``hold`` it waits for
        who reads its output, of which else only the newest 256 KiB are kept."""
        size = None if terminal is None else {"rows": terminal[0], "columns": terminal[1]}
        body = {**_command(command, cwd, env), "stdin": stdin, "pty": size, "hold": hold}
        return Process(self, (await self.json("POST", "/processes", body))["process"])

    async def processes(self) -> list[dict[str, Any]]:
        """All background processes, also those that ended lately."""
        found: list[dict[str, Any]] = await self.json("GET", "/processes")
        return found

    async def read_file(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Content of a file."""
        return b"".join([piece async for piece in self.read_pieces(path, offset=offset, limit=limit)])

    async def read_pieces(
        self, path: str, *, offset: int = 0, limit: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Content of a file as it comes."""
        params: dict[str, str | int] = {"path": path, "offset": offset}
        if limit is not None:
            params["limit"] = limit
        async with self.open("GET", "/file", params=params) as response:
            async for piece in response.aiter_raw():
                yield piece

    async def write_file(
        self, path: str, data: bytes | AsyncIterable[bytes], *, mode: int | None = None, append: bool = False
    ) -> None:
        """Replace a file in one step, or append to it, and make its directories."""
        params: dict[str, str | int] = {"path": path, "append": int(append)}
        if mode is not None:
            params["mode"] = mode
        await self.json("PUT", "/file", params=params, content=data, patient=True)

    async def list_files(self, path: str = "/workspace") -> list[dict[str, Any]]:
        """Entries of a directory, 10,000 at most: ``name``, ``kind``, ``size``, ``mode``, ``modified_s``."""
        found: list[dict[str, Any]] = (await self.json("GET", "/files", params={"path": path}))["entries"]
        return found

    async def stat(self, path: str) -> dict[str, Any]:
        """``kind``, ``size``, ``mode`` and ``modified_s`` of what a path leads to."""
        found: dict[str, Any] = await self.json("GET", "/stat", params={"path": path})
        return found

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a directory, which must be empty unless ``recursive``."""
        await self.json("DELETE", "/file", params={"path": path, "recursive": int(recursive)})

    async def snapshot(self) -> dict[str, Any]:
        """Keep the workspace as it is now: ``snapshot_id`` and more."""
        found: dict[str, Any] = await self.json("POST", "/snapshots", patient=True)
        return found

    async def fork(self, **wish: Any) -> "Sandbox":
        """A new sandbox with the files of this one as they are now, or were in ``snapshot_id``; also ``template``, ``ttl_s``
        and ``metadata``."""
        return Sandbox(self._wire, await self.json("POST", "/fork", wish, patient=True))

    async def restore(self, snapshot_id: str) -> None:
        """Begin this sandbox anew with a snapshot."""
        found = await self.json("POST", "/restore", {"snapshot_id": snapshot_id}, patient=True)
        self.generation = found["generation"]

    async def live(self, ttl_s: float) -> None:
        """Let it end ``ttl_s`` from now, in place of when it was to end; its template's lifetime bounds the whole."""
        found = await self.json("PATCH", "", {"ttl_s": ttl_s})
        self.expires_at = found["expires_at"]

    async def delete(self) -> None:
        """End it; one that is gone is fine."""
        try:
            await self._wire.json("DELETE", self._path)
        except ApiError as error:
            if error.status != 404:
                raise

    async def json(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Any request below the sandbox's path: its JSON answer."""
        try:
            return await self._wire.json(method, self._path + path, body, headers=self._headers, **more)
        except ApiError as error:
            raise self.noted(error) from None

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Any = None, *, params: Params | None = None
    ) -> AsyncGenerator[httpx.Response]:
        """Any request below the sandbox's path: its response, whose body is still to be read."""
        opening: AbstractAsyncContextManager[httpx.Response] = self._wire.open(
            method, self._path + path, body, params=params, headers=self._headers
        )
        try:
            async with opening as response:
                yield response
        except ApiError as error:
            raise self.noted(error) from None

    def noted(self, error: ApiError) -> ApiError:
        """The error; one that tells of a loss says which generation is here now."""
        if isinstance(error, SandboxLost):
            self.generation = error.generation
        return error

    @property
    def _path(self) -> str:
        return f"/sandboxes/{self.sandbox_id}"

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-sandbox-generation": str(self.generation)}


def _command(command: Command, cwd: str | None, env: Mapping[str, str] | None) -> dict[str, Any]:
    told_as = command if isinstance(command, str) else list(command)
    return {"command": told_as, "cwd": cwd, "env": dict(env or {})}
