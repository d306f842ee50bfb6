"""How long each rung of the kill ladder takes: the tables of `sandfleet.fleet.host.kill_times`, on a stack's engine."""

import asyncio
import os
import sys
from pathlib import Path

from sandfleet.localstack.measure.bed import Bed
from sandfleet.localstack.process import LocalStackError
from sandfleet.localstack.terminal import out


async def measure(bed: Bed, folder: Path) -> None:
    """Print the table; ``folder`` is for the sandboxes. Raises LocalStackError if that fails."""
    own = {
        "DOCKER_HOST": str(bed.stack.info.docker_host),
        "SANDFLEET_SANDBOX": "docker",
        "SANDFLEET_HOST_DIR": str(folder),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "sandfleet.fleet.host.kill_times",
        env={**os.environ, **own},
        stdout=asyncio.subprocess.PIPE,
    )
    text, _ = await process.communicate()
    out.print(
        "\nThe kill ladder: from a command's limit to its end, and to the end of the sandbox", highlight=False
    )
    out.print(text.decode(), highlight=False)
    if process.returncode:
        raise LocalStackError(f"The kill ladder could not be measured (status {process.returncode}).")
