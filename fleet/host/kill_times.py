"""How long each rung of the kill ladder takes here: ``python -m sandfleet.fleet.host.kill_times [--rounds N]``.

Starts one sandbox per row with the backend of the settings and prints a table: the time from the command's limit to
its end, as the agent tells it, and for the last rungs that from the host's decision to the end of the sandbox.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from sandfleet.fleet.host.__main__ import make_backend
from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.backend import Backend
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.settings import settings
from sandfleet.shared.templates import DEFAULT, read_templates

_LIMIT_S = 0.5
_COMMANDS = {
    "tree: one process": "sleep 300",
    "tree: sleep & wait": "sleep 300 & wait",
    "tree: SIGTERM ignored": "trap '' TERM INT HUP; sleep 300 & wait; wait",
    "tree: daemon without a trace": "(env -i setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; sleep 301",
    "tree: 100 processes": "for i in $(seq 100); do setsid sleep 300 & done; wait",
    "fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 300",
}


def agent_files(root: Path) -> AgentFiles:
    """The agent, in a folder that sandboxes may read."""
    root.chmod(0o755)  # the sandbox has another user
    return AgentFiles(root / "agent")


@contextlib.asynccontextmanager
async def _sandbox(backend: Backend, folder: Path, agent: AgentFiles) -> AsyncIterator[tuple[Sandbox, Fence]]:
    fence = Fence(RunKey("measure", "measure", uuid.uuid4()), 1)
    sandbox = await Sandbox.launch(
        backend, fence.key, folder, agent, read_templates(settings()).templates[DEFAULT]
    )
    serving = asyncio.create_task(sandbox.serve())
    try:
        yield sandbox, fence
    finally:
        await sandbox.destroy()
        await serving


async def _inside(sandbox: Sandbox, fence: Fence, command: str) -> tuple[float, str]:
    """Milliseconds from the limit to the end, and the rung."""
    spec = {"shell": command, "timeout_s": _LIMIT_S, "output_bytes": 1000}
    result = [event async for event in sandbox.exec(fence, spec, None)][-1][1]
    assert isinstance(result, dict)
    return result["duration_ms"] - _LIMIT_S * 1000, str(result["kill_rung"])


async def measure(rounds: int) -> None:
    """Print the table."""
    backend = make_backend(settings(), read_templates(settings()), "measure")
    await backend.open()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        agent = agent_files(root)
        _row("what", "rung", "median ms", "most ms")
        for what, command in _COMMANDS.items():
            async with _sandbox(backend, root / "sandboxes", agent) as (sandbox, fence):
                found = [await _inside(sandbox, fence, command) for _ in range(rounds)]
            _line(what, "/".join(sorted({rung for _, rung in found})), [spent for spent, _ in found])
        outside, removal = [], []
        for _ in range(rounds):
            async with _sandbox(backend, root / "sandboxes", agent) as (sandbox, _fence):
                start = time.monotonic()
                await sandbox.kill_from_outside("it is measured")
                outside.append((time.monotonic() - start) * 1000)
                start = time.monotonic()
                await sandbox.destroy()
                removal.append((time.monotonic() - start) * 1000)
        _line("from outside: freeze and kill", "3", outside)
        _line("removal", "4", removal)
    await backend.close()


def _line(what: str, rung: str, spent_ms: list[float]) -> None:
    _row(what, rung, f"{statistics.median(spent_ms):.0f}", f"{max(spent_ms):.0f}")


def _row(what: str, rung: str, median: str, most: str) -> None:
    sys.stdout.write(f"{what:<32}{rung:>6}{median:>12}{most:>10}\n")
    sys.stdout.flush()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet.fleet.host.kill_times", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times that each is measured (default: 5)")
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
