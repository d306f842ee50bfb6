"""How long a sandbox and its first command take here: ``python -m sandfleet.fleet.host.acquire_times [--at-once N …]``.

For each number of runs at once it starts that many sandboxes cold, then takes as many from a full warm pool, and prints
the time from the wish for a sandbox to the end of its first command, with the backend of the settings.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

from sandfleet.fleet.host.__main__ import make_backend
from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.backend import Backend
from sandfleet.fleet.host.capacity import Capacity
from sandfleet.fleet.host.kill_times import agent_files
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.snapshots import Snapshots
from sandfleet.fleet.host.state import StateFolder
from sandfleet.fleet.host.warm import Refill
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.settings import settings
from sandfleet.shared.templates import DEFAULT, Templates, read_templates

_LOOK_S = 0.05


async def _first_command(registry: Registry) -> float:
    """Milliseconds until the first command of a new run has ended."""
    start = time.monotonic()
    fence = Fence(RunKey("measure", "measure", uuid.uuid4()), 1)
    registry.admit(fence)
    sandbox = (await registry.acquire(fence)).sandbox
    spec = {"argv": ["true"], "timeout_s": 30, "output_bytes": 1000}
    async for _ in sandbox.exec(fence, spec, None):
        pass
    return (time.monotonic() - start) * 1000


async def _measure(backend: Backend, root: Path, agent: AgentFiles, at_once: int, warm: int) -> list[float]:
    default = read_templates(settings()).templates[DEFAULT].model_copy(update={"warm": warm})
    templates = Templates(templates={DEFAULT: default})
    folder = root / "sandboxes"
    folder.mkdir(exist_ok=True)
    registry = Registry(
        backend,
        folder,
        agent,
        templates,
        state=StateFolder(root / "state"),
        capacity=Capacity.of((default,) * (at_once + warm)),
        snapshots=Snapshots(settings().model_copy(update={"snapshot_bucket": ""}), root / "snapshots", ""),
        refill=Refill(1000.0, 3600.0),
    )
    keeping = asyncio.create_task(registry.warm.keep())
    while registry.warm.ready < warm:  # noqa: ASYNC110 - a pool tells nobody
        await asyncio.sleep(_LOOK_S)
    keeping.cancel()
    spent = await asyncio.gather(*(_first_command(registry) for _ in range(at_once)))
    await registry.close()
    return list(spent)


async def measure(numbers: list[int]) -> None:
    """Print the table."""
    backend = make_backend(settings(), read_templates(settings()), "measure")
    await backend.open()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        agent = agent_files(root)
        sys.stdout.write(f"{'at once':>8}{'':>6}{'median ms':>12}{'p95 ms':>10}{'most ms':>10}\n")
        for at_once in numbers:
            for kind, warm in (("cold", 0), ("warm", at_once)):
                spent = sorted(await _measure(backend, root, agent, at_once, warm))
                p95 = spent[max(0, -(-95 * len(spent) // 100) - 1)]
                row = (
                    f"{at_once:>8}{kind:>6}{statistics.median(spent):>12.0f}{p95:>10.0f}{spent[-1]:>10.0f}\n"
                )
                sys.stdout.write(row)
                sys.stdout.flush()
    await backend.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet.fleet.host.acquire_times", description=__doc__)
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[1, 10, 100], help="runs at once (default: 1 10 100)"
    )
    asyncio.run(measure(parser.parse_args().at_once))


if __name__ == "__main__":
    main()
