"""The Python client of the API's sandboxes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from sandfleet.fleet.sandbox_client import ApiError, Sandbox, SandboxApi, SandboxLost
from tests.sandboxes.conftest import Fleet
from tests.waiting import eventually


@pytest.fixture
async def api(fleet: Fleet) -> AsyncIterator[SandboxApi]:
    """Alice's."""
    async with SandboxApi(fleet.url, fleet.alice) as opened:
        yield opened


async def test_the_readme_in_short(api: SandboxApi) -> None:
    """Commands, files, and an end with the block."""
    async with await api.create(metadata={"for": "a test"}) as sandbox:
        await sandbox.write_file("in.txt", b"hello\n", mode=0o600)
        pieces: list[tuple[str, bytes]] = []
        result = await sandbox.exec(
            "cat in.txt; cat; echo $WHO >&2; exit 3",
            stdin=b"\xff\x00",
            env={"WHO": "me"},
            on_output=lambda *piece: pieces.append(piece),
        )
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"hello\n\xff\x00", b"me\n")
        assert b"".join(data for name, data in pieces if name == "stdout") == result.stdout
        assert [entry["name"] for entry in await sandbox.list_files()] == ["in.txt"]
        assert await sandbox.read_file("in.txt", offset=1, limit=3) == b"ell"
        assert (await sandbox.stat("in.txt"))["mode"] == 0o600
        await sandbox.remove("in.txt")
        with pytest.raises(ApiError, match=r"in\.txt") as refused:
            await sandbox.read_file("in.txt")
        assert (refused.value.status, refused.value.code) == (404, "not_found")
        assert [found["metadata"] for found in await api.search()] == [{"for": "a test"}]
    assert await api.search() == []


async def test_a_process_is_read_until_it_ends(api: SandboxApi) -> None:
    async with await api.create() as sandbox:
        process = await sandbox.start(["cat"], stdin=True)
        await process.write(b"one\n")
        await process.write(b"two\n", close=True)
        assert b"".join([data async for data in process.output()]) == b"one\ntwo\n"
        assert (process.exit_code, process.offset, process.lost_bytes) == (0, 8, 0)
        await process.kill()
        assert await sandbox.processes() == []


async def test_a_restore_by_somebody_else_is_told_once(api: SandboxApi) -> None:
    """The client says which generation it knows: it never works on other files without a word. Breaks when it sends no
    generation."""
    async with await api.create() as sandbox:
        await sandbox.write_file("file", b"one")
        snapshot_id = (await sandbox.snapshot())["snapshot_id"]
        other: Sandbox = await api.get(sandbox.sandbox_id)
        await other.restore(snapshot_id)
        with pytest.raises(SandboxLost) as lost:
            await sandbox.write_file("file", b"two")
        assert (lost.value.generation, lost.value.restored) == (2, snapshot_id)
        assert await sandbox.read_file("file") == b"one"
        async with await sandbox.fork(template="small") as fork:
            assert (fork.template, await fork.read_file("file")) == ("small", b"one")


async def test_cancelling_a_command_kills_it(api: SandboxApi) -> None:
    async with await api.create() as sandbox:
        running = asyncio.ensure_future(sandbox.exec("echo $$ > pid; exec sleep 600"))

        async def pid() -> str:
            return (await sandbox.exec("cat pid 2>/dev/null")).text.strip()

        number = await eventually(pid, what="the command runs")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        async def dead() -> bool:
            return (await sandbox.exec(f"test -d /proc/{number}")).exit_code == 1

        await eventually(dead, what="the command is killed")
