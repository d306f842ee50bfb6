"""Tools for any graph: run commands and read, write and list files in the run's own sandbox."""

from langchain_core.tools import BaseTool, ToolException, tool
from langgraph.prebuilt import ToolRuntime

from sandfleet.fleet.sandbox.output import Streamed, storable
from sandfleet.fleet.sandbox.run_sandbox import ExecResult, running_sandbox
from sandfleet.fleet.tools import idempotent, needs_sandbox
from sandfleet.shared.errors import SandboxError

# What a model is shown of one stream or file, in characters; the middle of longer text is left out.
_SHOWN_CHARS = 20_000
_READ_BYTES = 4 * 1024 * 1024
_SHOWN_ENTRIES = 500


@tool
async def execute(command: str, runtime: ToolRuntime, timeout_s: float | None = None) -> str:
    """Run a shell command in the sandbox and return its exit code, stdout and stderr.

    The working directory is /workspace. Files stay between commands. There is no network, or only what this sandbox was given. Programs started in the
    background with & keep running. A command over its time limit (timeout_s, in seconds) is killed.
    """
    try:
        result = await running_sandbox().exec(
            command, timeout_s=timeout_s, on_output=Streamed(runtime.emit_output_delta)
        )
    except SandboxError as error:
        raise _shown(error) from error
    return _report(result)


@tool
async def read_file(path: str, first_line: int = 1, lines: int = 2000) -> str:
    """Read a text file under /workspace or /tmp: at most `lines` lines, from line `first_line` (counted from 1)."""
    try:
        data = await running_sandbox().read_file(path, limit=_READ_BYTES + 1)
    except SandboxError as error:
        raise _shown(error) from error
    text = _text(data[:_READ_BYTES])
    every = text.splitlines(keepends=True)
    start = max(first_line, 1) - 1
    part = every[start : start + max(lines, 1)]
    shown = _shortened("".join(part))
    notes = []
    if start or start + len(part) < len(every):
        notes.append(f"[lines {start + 1} to {start + len(part)} of {len(every)}]")
    if len(data) > _READ_BYTES:
        notes.append(f"[only the first {_READ_BYTES} bytes of the file were read]")
    return "\n".join([shown, *notes]) if shown or notes else "(the file is empty)"


@tool
async def write_file(path: str, content: str) -> str:
    """Write a text file under /workspace or /tmp, replacing it if it exists. Missing directories are made."""
    data = content.encode("utf-8", "replace")
    try:
        await running_sandbox().write_file(path, data)
    except SandboxError as error:
        raise _shown(error) from error
    return f"wrote {len(data)} bytes to {storable(path)}"


@tool
async def list_files(path: str = "/workspace") -> str:
    """List a directory under /workspace or /tmp: one entry a line, directories with a slash, files with their size."""
    try:
        found = await running_sandbox().list_files(path)
    except SandboxError as error:
        raise _shown(error) from error
    entries = found["entries"]
    lines = [_line(entry["name"], entry["kind"], entry["size"]) for entry in entries[:_SHOWN_ENTRIES]]
    if found["truncated"] or len(entries) > _SHOWN_ENTRIES:
        lines.append(f"[only the first {len(lines)} entries are shown]")
    return "\n".join(lines) or "(the directory is empty)"


sandbox_tools: list[BaseTool] = [execute, read_file, write_file, list_files]
for _tool in sandbox_tools:
    _tool.handle_tool_error = True  # a ToolException becomes the tool's answer, and the model can react
    needs_sandbox(_tool)
for _tool in (
    read_file,
    write_file,
    list_files,
):  # a command may do anything; writing a file twice leaves the same file
    idempotent(_tool)


def _shown(error: SandboxError) -> ToolException:
    return ToolException(f"{error.code}: {storable(error.message)}")


def _report(result: ExecResult) -> str:
    lines = []
    if result.timed_out:
        seconds = result.duration_ms / 1000
        lines.append(f"timed out: killed after {seconds:.0f} s, with everything that the command had started")
    elif result.exit_code is not None:
        lines.append(f"exit code: {result.exit_code}")
    else:
        lines.append(f"killed by signal {result.signal}")
    if result.out_of_memory:
        limit = result.memory_limit_bytes
        limited = "" if limit is None else f" of {limit // 2**20} MiB"
        lines.append(
            f"the sandbox ran out of memory: over its limit{limited}, the system killed a process of it"
        )
    for name, data in (("stdout", result.stdout), ("stderr", result.stderr)):
        if data:
            lines += [f"{name}:", _shortened(_text(data)).rstrip("\n")]
    if not result.stdout and not result.stderr:
        lines.append("(no output)")
    return "\n".join(lines)


def _line(name: str, kind: str, size: int) -> str:
    # A name may hold any character, also one that would forge another entry.
    shown = storable(name).encode("unicode_escape").decode() if not name.isprintable() else name
    suffix = {"directory": "/", "file": f"\t{size}", "symlink": "@"}.get(kind, "\t(special)")
    return shown + suffix


def _text(data: bytes) -> str:
    return storable(data.decode("utf-8", "replace"))


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARS:
        return text
    half = _SHOWN_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
