"""The run's sandbox as the backend of a deep agent: ``create_deep_agent(model, backend=sandbox_backend())``.

It needs the package ``deepagents`` (``pip install 'sandfleet[deepagents]'``), which nothing else of sandfleet imports.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Final, TypeVar

from deepagents.backends import CompositeBackend
from deepagents.backends.protocol import (
    BackendProtocol,
    DeleteResult,
    EditResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
    GlobResult,
    GrepMatch,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox
from deepagents.middleware.filesystem import FilesystemMiddleware
from langgraph.pregel._tools import _tool_call_writer

from sandfleet.fleet.sandbox.output import Streamed, storable
from sandfleet.fleet.sandbox.run_sandbox import ExecResult, current_sandbox, running_sandbox
from sandfleet.fleet.tools import idempotent, needs_sandbox
from sandfleet.shared.errors import SandboxError

__all__ = ["SandboxBackend", "sandbox_backend"]

ARTIFACTS: Final = "/workspace/.deepagents"
"""Where an agent keeps what is too long for its context; in the workspace, and so in its snapshots."""

_WORKSPACE = "/workspace"
_PIECE_BYTES = 4 * 1024 * 1024
MOST_DOWNLOAD_BYTES = 64 * 1024 * 1024
"""Of one file that is asked for as a whole: what is in a sandbox must not fill the executor's memory."""

_MATCHES = 10_000
_SEARCH_S = 15.0
_IDEMPOTENT = frozenset({"ls", "read_file", "write_file", "glob", "grep"})
_FILE_ERRORS = {
    "not_found": "file_not_found",
    "permission_denied": "permission_denied",
    "is_a_directory": "is_directory",
    "bad_path": "invalid_path",
    "outside": "invalid_path",
    "not_a_directory": "invalid_path",
}

T = TypeVar("T")

_in_script: ContextVar[bool] = ContextVar("sandfleet_in_script", default=False)
"""Whether a command is a script of `BaseSandbox` and not the agent's: it runs outside the workspace, whose ``json.py``
it would import, and its output is not shown as the tool's."""


def sandbox_backend(routes: dict[str, BackendProtocol] | None = None) -> CompositeBackend:
    """The backend for agents that run in sandfleet: files and commands are the run's sandbox, made at its first use.

    One serves all runs. ``routes`` sends path prefixes to other backends, e.g. ``{"/memories/": StoreBackend(…)}``.
    """
    return CompositeBackend(default=SandboxBackend(), routes=routes or {}, artifacts_root=ARTIFACTS)


class SandboxBackend(BaseSandbox):
    """The sandbox of whichever run the caller works for. No method raises SandboxError: it becomes the result's error,
    or the output of a command without exit code, for the model to read.

    Those that are not async are for threads; called on the event loop of the graphs they return an error. `BaseSandbox`
    does what is not written out here, with scripts for the sandbox's Python; the rest would need programs that an image
    may lack, or more round trips. Output that is too long is saved by the agent's middleware: `BaseSandbox` could save
    it in the sandbox, but would keep it all back until the command's end, and wait for what runs in the background.
    """

    @property
    def id(self) -> str:
        """The run's id; empty where no executor runs the caller."""
        sandbox = current_sandbox.get(None)
        return "" if sandbox is None else str(sandbox.fence.key.run_id)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command for the shell. Without ``timeout`` (seconds), or with 0, the template's limit holds."""
        script = _in_script.get()
        output: list[bytes] = []
        writer = None if script else _tool_call_writer.get()
        streamed = None if writer is None else Streamed(writer)

        def add(stream: str, data: bytes) -> None:
            output.append(data)
            if streamed is not None:
                streamed(stream, data)

        try:
            ended = await running_sandbox().exec(
                command, cwd="/" if script else None, timeout_s=timeout or None, on_output=add
            )
        except SandboxError as error:
            if script:
                raise
            return ExecuteResponse(_shown(error))
        text = storable(b"".join(output).decode("utf-8", "replace"))
        return ExecuteResponse(text + _note(ended), _exit_code(ended), ended.truncated)

    async def als(self, path: str) -> LsResult:
        return await _answered(_script(super().als, path), LsResult)

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return await _answered(_script(super().aread, file_path, offset, limit), ReadResult)

    async def aedit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> EditResult:
        edited = _script(super().aedit, file_path, old_string, new_string, replace_all)
        return await _answered(edited, EditResult)

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        return await _answered(_script(super().aglob, pattern, path or _WORKSPACE), GlobResult)

    async def agrep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        return await _answered(self._grep(pattern, path or _WORKSPACE, glob, max_count), GrepResult)

    async def _grep(self, pattern: str, path: str, glob: str | None, max_count: int | None) -> GrepResult:
        files = running_sandbox().files
        is_directory = (await files.stat(path))["kind"] == "directory"
        most = _MATCHES if max_count is None else min(max_count, _MATCHES)
        found = await files.grep(
            pattern, path, glob=glob if is_directory else None, fixed=True, limit=most, timeout_s=_SEARCH_S
        )
        matches = [
            GrepMatch(
                path=f"{path.rstrip('/')}/{item['name']}" if is_directory else path,
                line=item["line"],
                text=storable(item["text"]),
            )
            for item in found.items
            if not set(self.grep_exclude_dirs).intersection(item["name"].split("/")[:-1])
        ]
        return GrepResult(matches=matches, truncated=found.truncated or found.timed_out)

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await _answered(self._write(file_path, content), WriteResult)

    async def _write(self, file_path: str, content: str) -> WriteResult:
        await running_sandbox().write_file(file_path, content.encode("utf-8", "replace"))
        return WriteResult(path=file_path)

    async def adelete(self, file_path: str) -> DeleteResult:
        return await _answered(self._delete(file_path), DeleteResult)

    async def _delete(self, file_path: str) -> DeleteResult:
        await running_sandbox().files.remove(file_path, recursive=True)
        return DeleteResult(path=file_path)

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [await self._upload(path, content) for path, content in files]

    async def _upload(self, path: str, content: bytes) -> FileUploadResponse:
        try:
            await running_sandbox().write_file(path, content)
        except SandboxError as error:
            return FileUploadResponse(path, _file_error(error))
        return FileUploadResponse(path)

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [await self._download(path) for path in paths]

    async def _download(self, path: str) -> FileDownloadResponse:
        content = bytearray()
        try:
            while piece := await running_sandbox().read_file(path, offset=len(content), limit=_PIECE_BYTES):
                content += piece
                if len(content) > MOST_DOWNLOAD_BYTES:
                    return FileDownloadResponse(path, None, f"larger than {MOST_DOWNLOAD_BYTES} bytes")
        except SandboxError as error:
            return FileDownloadResponse(path, None, _file_error(error))
        return FileDownloadResponse(path, bytes(content))

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Like `aexecute`, for threads."""
        try:
            return running_sandbox().from_thread(partial(self.aexecute, command, timeout=timeout))
        except SandboxError as error:
            return ExecuteResponse(_shown(error))

    def ls(self, path: str) -> LsResult:
        return _in_thread(self.als, LsResult, path)

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return _in_thread(self.aread, ReadResult, file_path, offset, limit)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return _in_thread(self.aedit, EditResult, file_path, old_string, new_string, replace_all)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        return _in_thread(self.aglob, GlobResult, pattern, path)

    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        return _in_thread(self.agrep, GrepResult, pattern, path, glob, max_count=max_count)

    def write(self, file_path: str, content: str) -> WriteResult:
        return _in_thread(self.awrite, WriteResult, file_path, content)

    def delete(self, file_path: str) -> DeleteResult:
        return _in_thread(self.adelete, DeleteResult, file_path)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        try:
            return running_sandbox().from_thread(partial(self.aupload_files, files))
        except SandboxError as error:
            return [FileUploadResponse(path, _file_error(error)) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        try:
            return running_sandbox().from_thread(partial(self.adownload_files, paths))
        except SandboxError as error:
            return [FileDownloadResponse(path, None, _file_error(error)) for path in paths]


async def _script(method: Callable[..., Awaitable[T]], *args: Any) -> T:
    token = _in_script.set(True)
    try:
        return await method(*args)
    finally:
        _in_script.reset(token)


async def _answered(work: Awaitable[T], result: Callable[..., T]) -> T:
    """What ``work`` gives, or a ``result`` with the error of the sandbox."""
    try:
        return await work
    except SandboxError as error:
        return result(error=_shown(error))


def _in_thread(method: Callable[..., Any], result: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        answer: T = running_sandbox().from_thread(partial(method, *args, **kwargs))
    except SandboxError as error:
        return result(error=_shown(error))
    return answer


def _shown(error: SandboxError) -> str:
    return f"Error: {error.code}: {storable(error.message)}"


def _file_error(error: SandboxError) -> str:
    return _FILE_ERRORS.get(error.code) or _shown(error)


def _exit_code(ended: ExecResult) -> int:
    """The exit code as shells have it: 128 and the signal, 124 when time ran out."""
    if ended.timed_out:
        return 124
    return 128 + (ended.signal or 0) if ended.exit_code is None else ended.exit_code


def _note(ended: ExecResult) -> str:
    notes = []
    if ended.timed_out:
        seconds = ended.duration_ms / 1000
        notes.append(
            f"\n[timed out: killed after {seconds:.0f} s, with everything that the command had started]"
        )
    if ended.out_of_memory:
        limit = ended.memory_limit_bytes
        limited = "" if limit is None else f" of {limit // 2**20} MiB"
        notes.append(
            f"\n[the sandbox ran out of memory: over its limit{limited}, the system killed a process of it]"
        )
    return "".join(notes)


def _declare(init: Callable[..., None]) -> Callable[..., None]:
    """Let the agent's tools wait for room, and be repeated where that does no harm, if they work in the sandbox.

    The agent makes its tools, and those of its subagents, out of reach of whoever calls `create_deep_agent`.
    """

    @wraps(init)
    def declared(self: FilesystemMiddleware[Any, Any], *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        backend = self.backend.default if isinstance(self.backend, CompositeBackend) else self.backend
        if isinstance(backend, SandboxBackend):
            for tool in self.tools:
                needs_sandbox(tool)
                if tool.name in _IDEMPOTENT:
                    idempotent(tool)

    return declared


FilesystemMiddleware.__init__ = _declare(FilesystemMiddleware.__init__)  # type: ignore[method-assign]
