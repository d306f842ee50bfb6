"""Snapshots of sandboxes, sandboxes that begin with one, and what is told of a sandbox that was lost."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from tests.sandbox.conftest import containers
from tests.sandboxes.calls import events, make, run
from tests.sandboxes.conftest import Fleet
from tests.waiting import eventually


async def snapshot(http: httpx.AsyncClient, path: str) -> str:
    taken = await http.post(f"{path}/snapshots")
    assert taken.status_code == 201, taken.text
    return str(taken.json()["snapshot_id"])


async def kill_container(fleet: Fleet) -> None:
    """The only sandbox dies as by the machine's hand."""
    (container,) = await containers(fleet.host)
    async with Engine(fleet.host.docker_host) as engine:
        await engine.call("POST", f"/containers/{container['Id']}/kill")


@asynccontextmanager
async def sandbox_of_a_run(fleet: Fleet) -> AsyncIterator[RunSandbox]:
    """Of a run of alice's, which ends with the block."""
    key = await fleet.host.new_run(tenant="acme", user_id="alice")
    client = SandboxClient(fleet.host.socket)
    sandbox = await fleet.host.sandbox(client, key=key)
    try:
        yield sandbox
    finally:
        await sandbox.close()
        await client.aclose()
        await fleet.host.set_status(key, "success")


async def test_a_fork_goes_its_own_way(http: httpx.AsyncClient) -> None:
    """It begins with the files of the other, as they are now or were in a snapshot, and changes none of them."""
    path = await make(http)
    await run(http, path, "echo one > file")
    first = await snapshot(http, path)
    await run(http, path, "echo two > file")
    forked = await http.post(f"{path}/fork", json={"metadata": {"fork": True}})
    assert forked.status_code == 201, forked.text
    assert (forked.json()["generation"], forked.json()["metadata"]) == (1, {"fork": True})
    fork = f"/sandboxes/{forked.json()['sandbox_id']}"
    assert (await run(http, fork, "cat file; echo three > file"))["stdout"] == "two\n"
    assert (await run(http, path, "cat file"))["stdout"] == "two\n"
    older = (await http.post(f"{path}/fork", json={"snapshot_id": first})).json()
    assert older["restored"] == first
    assert (await run(http, f"/sandboxes/{older['sandbox_id']}", "cat file"))["stdout"] == "one\n"
    listed = (await http.get(f"{path}/snapshots")).json()
    assert [found["snapshot_id"] for found in listed] == [older["snapshot_id"], first][::-1] or len(
        listed
    ) == 2
    assert listed[-1]["snapshot_id"] == first
    other = await http.post(f"{fork}/fork", json={"snapshot_id": first})
    assert other.status_code == 404, "a snapshot of another sandbox is not this one's"


async def test_a_fork_that_is_sent_again_takes_no_further_snapshot(http: httpx.AsyncClient) -> None:
    """It is answered when the sandbox that was forked is gone, too. Breaks when a snapshot is taken before the key is looked up,
    or when copies of a request keep one each."""
    path = await make(http)
    headers = {"idempotency-key": uuid.uuid4().hex}
    copies = [http.post(f"{path}/fork", headers=headers) for _ in range(3)]
    answers = [*await asyncio.gather(*copies), await http.post(f"{path}/fork", headers=headers)]
    assert len((await http.get(f"{path}/snapshots")).json()) == 1
    await http.delete(path)
    answers.append(await http.post(f"{path}/fork", headers=headers))
    assert {answer.status_code for answer in answers} == {201}, [answer.text for answer in answers]
    assert len({answer.json()["sandbox_id"] for answer in answers}) == 1


async def test_a_fork_that_cannot_be_made_leaves_no_snapshot(http: httpx.AsyncClient) -> None:
    """Breaks when each attempt keeps one: the tenant would soon have as many as it may have."""
    path = await make(http)
    refused = await http.post(f"{path}/fork", json={"template": "unknown"})
    assert refused.status_code == 422, refused.text
    assert (await http.get(f"{path}/snapshots")).json() == []


async def test_a_snapshot_outlives_a_sandbox_that_cannot_hold_it(http: httpx.AsyncClient) -> None:
    """Neither one that is larger than the workspace, nor one whose many files take more than they say, is given up: it fits
    where it came from. Breaks when whatever cannot be unpacked is taken for damaged, and removed."""
    path = await make(http)
    await run(http, path, "head -c 20M /dev/zero > zeros")
    large = await snapshot(http, path)
    await run(http, path, "rm zeros; mkdir many; seq 6000 | split -l 1 -a 4 - many/")
    many = await snapshot(http, path)
    for taken, said in ((large, "20971520 bytes"), (many, "could not be made")):
        fork = {"snapshot_id": taken, "template": "small"}
        refused = await http.post(f"{path}/fork", json=fork)
        assert (refused.status_code, refused.json()["code"]) == (422, "snapshot_failed"), refused.text
        assert said in refused.json()["detail"]
        assert (await http.get(f"/snapshots/{taken}")).status_code == 200
        forked = await http.post(f"{path}/fork", json={"snapshot_id": taken})
        assert (forked.status_code, forked.json()["restored"]) == (201, taken), forked.text
        await http.delete(f"/sandboxes/{forked.json()['sandbox_id']}")


async def test_a_sandbox_keeps_its_files_if_the_snapshot_does_not_fit(http: httpx.AsyncClient) -> None:
    """Breaks when the generation is ended before anybody looks whether the next one could be made."""
    path = await make(http)
    await run(http, path, "head -c 20M /dev/zero > zeros")
    large = await snapshot(http, path)
    small = await make(http, template="small")
    await run(http, small, "echo mine > file")
    refused = await http.post(f"{small}/restore", json={"snapshot_id": large})
    assert (refused.status_code, refused.json()["code"]) == (422, "snapshot_failed"), refused.text
    assert (await run(http, small, "cat file"))["stdout"] == "mine\n"


async def test_restore_begins_the_sandbox_anew(http: httpx.AsyncClient) -> None:
    """Its files are those of the snapshot, its processes are gone, and who holds to the old generation is told. Breaks when
    the host keeps the sandbox of the generation before."""
    path = await make(http)
    await run(http, path, "echo one > file")
    first = await snapshot(http, path)
    await run(http, path, "rm file; echo late > late")
    await http.post(f"{path}/processes", json={"command": "sleep 600"})
    restored = await http.post(f"{path}/restore", json={"snapshot_id": first})
    assert restored.status_code == 200, restored.text
    assert (restored.json()["generation"], restored.json()["restored"]) == (2, first)
    assert (await run(http, path, "cat *"))["stdout"] == "one\n"
    assert (await http.get(f"{path}/processes")).json() == []
    told = await http.post(f"{path}/exec", json={"command": "true"}, headers={"x-sandbox-generation": "1"})
    assert (told.status_code, told.json()["code"], told.json()["generation"]) == (410, "sandbox_lost", 2)


async def test_a_sandbox_that_dies_while_it_is_made_is_made_again(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    """Nobody has seen it, so nobody is told. Red when its death is told as a loss of what the caller had, without a word on what
    is there now."""
    path = await make(http)
    await run(http, path, "for i in $(seq 3000); do echo $i > $i; done")
    kept = await snapshot(http, path)
    before = {each["Id"] for each in await containers(fleet.host)}
    restoring = asyncio.create_task(http.post(f"{path}/restore", json={"snapshot_id": kept}))
    async with Engine(fleet.host.docker_host) as engine:

        async def half_made() -> str | None:
            for each in await containers(fleet.host):
                if each["Id"] not in before and each["State"] == "running":
                    pid = (await engine.call("GET", f"/containers/{each['Id']}/json"))["State"]["Pid"]
                    if pid and any(Path(f"/proc/{pid}/root/workspace").iterdir()):
                        return str(each["Id"])
            return None

        await engine.call("POST", f"/containers/{await eventually(half_made, what='files in it')}/kill")
    restored = await restoring
    assert (restored.status_code, restored.json()["restored"]) == (200, kept), restored.text
    assert (await run(http, path, "ls | wc -l"))["stdout"] == "3000\n"


async def test_a_restored_sandbox_forgets_what_it_was_before(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """When it is lost it begins with the snapshot that was restored, and not with a later one of the time before. Breaks when
    `to_restore` does not look when the sandbox was begun."""
    path = await make(http)
    await run(http, path, "echo one > file")
    first = await snapshot(http, path)
    await run(http, path, "echo two > file")
    await snapshot(http, path)
    await http.post(f"{path}/restore", json={"snapshot_id": first})
    await kill_container(fleet)
    lost = await eventually(lambda: told_of_loss(http, path), what="the loss is told")
    assert lost["restored"] == first
    assert (await run(http, path, "cat file"))["stdout"] == "one\n"


async def told_of_loss(http: httpx.AsyncClient, path: str) -> dict[str, object] | None:
    answer = await http.post(f"{path}/exec", json={"command": "true"})
    return answer.json() if answer.status_code == 410 else None


async def test_a_lost_sandbox_says_what_is_in_the_next(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """Once, naming the snapshot that was restored; then it goes on with its files. Breaks when the next one is made in
    silence."""
    path = await make(http)
    await run(http, path, "echo kept > file")
    first = await snapshot(http, path)
    await kill_container(fleet)
    lost = await eventually(lambda: told_of_loss(http, path), what="the loss is told")
    assert (lost["code"], lost["generation"], lost["restored"]) == ("sandbox_lost", 2, first)
    assert first in str(lost["detail"])
    assert (await run(http, path, "cat file"))["stdout"] == "kept\n"
    shown = (await http.get(path)).json()
    assert (shown["generation"], shown["restored"]) == (2, first)


async def test_a_lost_sandbox_without_a_snapshot_is_empty_and_says_so(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    """And a client that says which generation it knows is told for as long as it does."""
    path = await make(http)
    await kill_container(fleet)
    lost = await eventually(lambda: told_of_loss(http, path), what="the loss is told")
    assert (lost["generation"], lost["restored"]) == (2, None)
    assert "empty" in str(lost["detail"])
    for _ in range(2):
        answer = await http.get(f"{path}/files", headers={"x-sandbox-generation": "1"})
        assert (answer.status_code, answer.json()["generation"]) == (410, 2)
    assert (await http.get(f"{path}/files", headers={"x-sandbox-generation": "2"})).status_code == 200


async def test_a_loss_in_the_middle_of_a_command_is_its_last_event(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    path = await make(http)
    async with http.stream("POST", f"{path}/exec/stream", json={"command": "sleep 600"}) as response:
        await kill_container(fleet)
        found = await events(response)
    assert found[-1][0] == "error"
    assert (found[-1][1]["error"], found[-1][1]["generation"]) == ("sandbox_lost", 2)
    assert (await run(http, path, "true"))["exit_code"] == 0


async def test_a_sandbox_begins_with_the_snapshot_of_a_run(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """And the run's snapshots are listed."""
    async with sandbox_of_a_run(fleet) as sandbox:
        key = sandbox.fence.key
        await sandbox.exec("echo of a run > file")
        taken = await sandbox.snapshot("request")
        assert taken is not None
    listed = (await http.get(f"/runs/{key.run_id}/snapshots")).json()
    assert [(found["snapshot_id"], found["of"]) for found in listed] == [
        (taken["snapshot_id"], str(key.run_id))
    ]
    path = await make(http, snapshot_id=taken["snapshot_id"])
    assert (await run(http, path, "cat file"))["stdout"] == "of a run\n"
    async with fleet.http(fleet.bob) as bob:
        assert (await bob.get(f"/runs/{key.run_id}/snapshots")).status_code == 404


async def test_what_a_living_sandbox_began_with_stays(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """Although the run has left a newer one: after a loss the sandbox begins with it again. Red when a run's snapshot is given
    up for the next one whoever has begun with it."""
    async with sandbox_of_a_run(fleet) as sandbox:
        await sandbox.exec("echo first > file")
        taken = await sandbox.snapshot("interrupt")
        assert taken is not None
        path = await make(http, snapshot_id=taken["snapshot_id"])
        await sandbox.exec("echo second > file")
        assert await sandbox.snapshot("interrupt") is not None

    async def alone() -> bool:
        return len(await containers(fleet.host)) == 1

    await eventually(alone, what="the run's sandbox is gone")
    await kill_container(fleet)
    lost = await eventually(lambda: told_of_loss(http, path), what="the loss is told")
    assert lost["restored"] == taken["snapshot_id"]
    assert (await run(http, path, "cat file"))["stdout"] == "first\n"


async def test_a_tenant_keeps_so_many_snapshots(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """Those that were asked for; the answer says what to do. Breaks when each fork may leave one for a week."""
    path = await make(http)
    first = await snapshot(http, path)
    of_request = "select count(*) from snapshots where reason = 'request' and expires_at > clock_timestamp()"
    (kept,) = (await fleet.sql(of_request))[0]
    await fleet.sql("update tenants set max_snapshots = %s", kept)
    try:
        for asked in (http.post(f"{path}/snapshots"), http.post(f"{path}/fork", json={})):
            refused = await asked
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_snapshots"), refused.text
            assert "Delete one" in refused.json()["detail"]
        await http.delete(f"/snapshots/{first}")
        await snapshot(http, path)
    finally:
        await fleet.sql("update tenants set max_snapshots = null")


async def test_snapshots_that_are_taken_at_once_do_not_pass_the_bound(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    """Breaks when they are counted before their archives are made only: all would find room for one more."""
    paths = await asyncio.gather(*(make(http) for _ in range(4)))
    live = "select count(*) from snapshots where reason = 'request' and expires_at > clock_timestamp()"
    (kept,) = (await fleet.sql(live))[0]
    await fleet.sql("update tenants set max_snapshots = %s", kept + 2)
    try:
        answers = await asyncio.gather(*(http.post(f"{path}/snapshots") for path in paths * 3))
        assert sorted(answer.status_code for answer in answers) == [201] * 2 + [429] * 10
        assert await fleet.sql(live) == [(kept + 2,)]
    finally:
        await fleet.sql("update tenants set max_snapshots = null")


async def test_snapshots_are_read_and_given_up(http: httpx.AsyncClient) -> None:
    """A snapshot outlives its sandbox, until its owner deletes it."""
    path = await make(http)
    first = await snapshot(http, path)
    await http.delete(path)
    assert (await http.get(f"{path}/snapshots")).json()[0]["snapshot_id"] == first
    assert (await http.get(f"/snapshots/{first}")).json()["reason"] == "request"
    assert first in [found["snapshot_id"] for found in (await http.get("/snapshots")).json()]
    assert (await http.delete(f"/snapshots/{first}")).status_code == 204
    assert (await http.get(f"/snapshots/{first}")).status_code == 404
    assert (await http.post("/sandboxes", json={"snapshot_id": first})).status_code == 404
    assert (await http.post("/sandboxes", json={"snapshot_id": str(uuid.uuid4())})).status_code == 404
