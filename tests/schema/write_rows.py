"""Write what this version leaves in a database that it is stopped in the middle of, as SQL: ``python -m tests.schema.write_rows FILE``.

Done once per release, by the release itself; later versions are tested on the file (`test_old_rows.py`). The executor and the host
are killed, so that nothing is put in order. Times are those of the stack, whoever reads the file moves them.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psycopg
from langgraph_sdk import get_client

from sandfleet.localstack.stack import Stack
from tests.waiting import eventually

PROJECT = Path(__file__).parent.parent / "projects" / "basic" / "langgraph.json"
LEFT_OUT = (
    "alembic_version",
    "turns",
    "deployment",
    "api_keys",
)  # made by migrations, and by the stack that reads the rows
NOBODYS = "/dev/null"  # the file that tools append to: also another machine has it


async def leave_rows(stack: Stack) -> None:
    """Runs that have ended, wait, are interrupted and are at work, and a sandbox without a run."""
    info = stack.info
    client = get_client(url=info.api_url, api_key=info.api_key)

    async def thread(name: str) -> str:
        return (await client.threads.create(metadata={"name": name}))["thread_id"]

    async def at_work(run_id: str, thread_id: str, calls: int) -> None:
        async def begun() -> bool:
            state = await client.threads.get_state(thread_id)
            run = await client.runs.get(thread_id, run_id)
            return run["status"] == "running" and len(state["values"].get("messages", [])) >= calls

        await eventually(begun, what="the run is in its last call")

    def calls(*tools: str) -> dict[str, object]:
        return {"path": NOBODYS, "calls": [[{"tool": tool, "line": str(n)}] for n, tool in enumerate(tools)]}

    await client.runs.wait(await thread("ended"), "effects", input=calls("append", "fail"))
    await client.runs.wait(await thread("interrupted"), "approve", input={"question": "Old?"})
    await client.runs.wait(
        await thread("interrupted call"), "effects", input=calls("append", "append_if_approved")
    )
    headers = {"x-api-key": info.api_key}
    async with httpx.AsyncClient(base_url=info.api_url, headers=headers, timeout=120) as http:
        made = await http.post("/sandboxes", json={"metadata": {"name": "old"}, "ttl_s": 3600})
        made.raise_for_status()
    working, commanding = await thread("at work"), await thread("commanding")
    run = await client.runs.create(
        working, "effects", input=calls("append", "wait", "append"), stream_mode="updates"
    )
    await at_work(run["run_id"], working, 3)
    commands = ["echo first > kept; echo done", "sleep 3600", "echo last"]
    run = await client.runs.create(commanding, "sandboxed", input={"commands": commands})
    await at_work(run["run_id"], commanding, 3)
    await stack.kill("executor-1")
    await client.runs.create(working, "effects", input=calls(*["append"] * 4), multitask_strategy="enqueue")
    await client.runs.create(await thread("delayed"), "counter", input={"steps": 2}, after_seconds=5)
    async with httpx.AsyncClient(base_url=info.api_url, headers=headers) as http:
        key = {"idempotency-key": "old"}
        body = {"assistant_id": "counter", "input": {"steps": 3}}
        posted = await http.post(f"/threads/{await thread('pending')}/runs", json=body, headers=key)
        posted.raise_for_status()
    await stack.kill("host")
    async with await psycopg.AsyncConnection.connect(info.database_url) as connection:  # a tenth of the size
        await connection.execute("delete from graphs where graph_id not in (select graph_id from runs)")
        await connection.execute("delete from assistants where graph_id not in (select graph_id from runs)")


async def main(file: Path) -> None:
    """Start a stack of its own, leave rows in it, write them to ``file`` and stop it."""
    with tempfile.TemporaryDirectory(prefix="sandfleet") as root:
        stack = Stack(
            Path(root),
            PROJECT,
            sandbox="docker",
            env={"SANDFLEET_LEASE_S": "6", "SANDFLEET_RENEW_EVERY_S": "1.5"},
        )
        try:
            await stack.start()
            await leave_rows(stack)
            left_out = [f"--exclude-table-data={name}" for name in LEFT_OUT]
            dump = [
                "pg_dump",
                "--data-only",
                "--inserts",
                "--no-owner",
                "--no-privileges",
                "--restrict-key=none",
            ]
            text = subprocess.run(
                [*dump, *left_out, stack.info.database_url], check=True, capture_output=True, text=True
            ).stdout
        finally:
            await stack.stop()
    lines = [line for line in text.splitlines() if line and not line.startswith(("--", "\\"))]
    rows = "\n".join(lines)
    machine_id = Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").exists() else ""
    for name in (os.uname().nodename, machine_id):  # not those of whoever reads them
        rows = rows.replace(name, "machine") if name else rows
    file.write_text(rows.replace(root, "/var/lib/sandfleet") + "\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
