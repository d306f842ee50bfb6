"""``sandfleet cancel RUN``: end a run and wait until it has ended."""

from pathlib import Path

from sandfleet.localstack.connection import connect, find_run
from sandfleet.localstack.terminal import out


async def cancel(root: Path, run_id: str) -> int:
    """Cancel a run; cancelling one that has ended is an error of the API's."""
    async with connect(root) as client:
        run = await find_run(client, run_id)
        await client.runs.cancel(run["thread_id"], run_id, wait=True)
        out.print(f"{(await client.runs.get(run['thread_id'], run_id))['status']}  run {run_id}")
    return 0
