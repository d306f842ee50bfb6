"""Background processes of a run's sandbox: they outlive calls and attempts, and end with the sandbox."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandfleet.fleet.sandbox.files import Use

_WAIT_AT_ONCE_S = 60.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A background process: its number in the sandbox, its pid there, and how it ended if it does not run.

    ``next_offset`` is where its output goes on, in bytes from its start.
    """

    process: int
    pid: int
    running: bool
    exit_code: int | None
    signal: int | None
    next_offset: int


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """A piece of output, stdout and stderr as they came, from ``offset``; ``lost_bytes`` before it are kept no more."""

    state: ProcessState
    offset: int
    lost_bytes: int
    data: bytes


class SandboxProcesses:
    """All methods raise SandboxError, with the codes of ``docs/sandbox-protocol.md``."""

    def __init__(self, use: Use) -> None:
        self._use = use

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> ProcessState:
        """Start a command that goes on in the background. ``stdin``: ``write`` will be used; ``terminal``: its size."""
        asked = {
            "command": command if isinstance(command, str) else list(command),
            "cwd": cwd,
            "env": dict(env or {}),
            "stdin": stdin,
            "pty": None if terminal is None else {"rows": terminal[0], "columns": terminal[1]},
        }
        return _state(
            await self._use(
                lambda client, token: client.call("POST", "/sandbox/processes", token, json=asked)
            )
        )

    async def list(self) -> list[dict[str, Any]]:
        """State of all, also of those that ended lately, with ``command``, ``age_s``, ``terminal`` and ``stdin``."""
        found = await self._use(lambda client, token: client.call("GET", "/sandbox/processes", token))
        return list(found["processes"])

    async def read(self, process: int, offset: int = 0, *, wait_s: float = 0) -> ProcessOutput:
        """Output from ``offset``. If there is none yet, waits up to ``wait_s`` (60 at most) for some or for the end."""
        params = {"offset": offset, "wait_ms": int(min(wait_s, _WAIT_AT_ONCE_S) * 1000)}
        found = await self._ask("GET", f"{process}/output", params=params)
        return ProcessOutput(
            _state(found), found["offset"], found["lost_bytes"], base64.b64decode(found["data"])
        )

    async def write(self, process: int, data: bytes, *, close: bool = False) -> None:
        """Write to its stdin or terminal, and close that then; returns when the process has taken it."""
        await self._ask("PUT", f"{process}/stdin", params={"close": int(close)}, data=data)

    async def signal(self, process: int, number: int) -> ProcessState:
        """Send a signal to its process group; nothing happens to one that has ended."""
        return _state(await self._ask("POST", f"{process}/signal", json={"signal": number}))

    async def resize(self, process: int, rows: int, columns: int) -> ProcessState:
        """Give its terminal another size."""
        return _state(await self._ask("POST", f"{process}/resize", json={"rows": rows, "columns": columns}))

    async def wait(self, process: int, wait_s: float = _WAIT_AT_ONCE_S) -> ProcessState:
        """Its state once it has ended, or after ``wait_s`` (60 at most)."""
        params = {"wait_ms": int(min(wait_s, _WAIT_AT_ONCE_S) * 1000)}
        return _state(await self._ask("GET", f"{process}", params=params))

    async def kill(self, process: int, *, keep: bool = False) -> ProcessState:
        """Kill it with all that it has started, and forget it unless its output is to be kept."""
        return _state(await self._ask("DELETE", f"{process}", params={"keep": int(keep)}))

    async def _ask(self, method: str, what: str, **sent: Any) -> dict[str, Any]:
        return await self._use(
            lambda client, token: client.call(method, f"/sandbox/processes/{what}", token, **sent)
        )


def _state(found: dict[str, Any]) -> ProcessState:
    return ProcessState(**{name: found[name] for name in ProcessState.__dataclass_fields__})
