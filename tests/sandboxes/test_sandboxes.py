"""Sandboxes without a run: made, found and ended."""

import asyncio
import uuid
from datetime import datetime
from typing import Any

import httpx
import pytest

from sandfleet.functions.api.app import create_app
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store import sandboxes
from tests.api.conftest import make_settings, serve
from tests.sandboxes.calls import make, run
from tests.sandboxes.conftest import Fleet
from tests.waiting import eventually


async def gone(fleet: Fleet) -> None:
    """The host has no sandbox any more."""

    async def empty() -> bool:
        return (await fleet.host.health())["sandboxes"] == 0

    await eventually(empty, what="the host has removed it")


async def test_a_sandbox_from_its_begin_to_its_end(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Made, read, found, used, removed: then it is nowhere."""
    made = await http.post("/sandboxes", json={"metadata": {"for": "me"}, "ttl_s": 100})
    assert made.status_code == 201, made.text
    sandbox = made.json()
    path = f"/sandboxes/{sandbox['sandbox_id']}"
    assert made.headers["location"] == path
    assert (await http.get(path)).json() == sandbox
    assert (await run(http, path, "echo hello"))["stdout"] == "hello\n"
    assert (await http.delete(path)).status_code == 204
    assert (await http.get(path)).status_code == 404
    assert (await http.delete(path)).status_code == 404
    assert (await http.post(f"{path}/exec", json={"command": "true"})).status_code == 404
    assert (await http.get("/sandboxes")).json() == []
    await gone(fleet)


async def test_sandboxes_are_found_by_metadata_and_template_in_pages(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """Newest first, only the caller's own."""
    paths = [await make(http, template="small", metadata={"n": n, "odd": n % 2 == 1}) for n in range(3)]
    other = await make(http)
    ids = [path.removeprefix("/sandboxes/") for path in (*paths, other)]

    async def found(answer: httpx.Response) -> list[str]:
        assert answer.status_code == 200, answer.text
        return [sandbox["sandbox_id"] for sandbox in answer.json()]

    assert await found(await http.get("/sandboxes")) == ids[::-1]
    odd = await http.post("/sandboxes/search", json={"metadata": {"odd": True}})
    assert await found(odd) == [ids[1]]
    first = await http.get("/sandboxes", params={"template": "small", "limit": 2})
    assert await found(first) == [ids[2], ids[1]]
    assert first.headers["x-pagination-next"] == "2"
    last = await http.get("/sandboxes", params={"template": "small", "limit": 2, "offset": 2})
    assert await found(last) == [ids[0]]
    assert "x-pagination-next" not in last.headers
    async with fleet.http(fleet.bob) as bob:
        assert (await bob.get("/sandboxes")).json() == []


@pytest.mark.parametrize("swept", [False, True])
async def test_a_sandbox_ends_with_its_time(fleet: Fleet, http: httpx.AsyncClient, swept: bool) -> None:
    """For its owner at once, whether or not a sweep has come; on its host by the next beat. Breaks when the host's heartbeat
    does not look at the time, or a read does not."""
    path = await make(http)
    await fleet.sql("update sandboxes set expires_at = clock_timestamp()")
    assert (await http.get(path)).status_code == 404
    if swept:
        await fleet.sql("delete from sandboxes")
        await fleet.sql("delete from placements")
    await gone(fleet)


async def test_a_host_keeps_what_has_an_owner(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Breaks when the host looks for runs only: it removes the sandbox at its next beat."""
    path = await make(http)
    await run(http, path, "echo kept > file")
    (before,) = await fleet.sql("select heartbeat_at from hosts")

    async def beaten_twice() -> bool:
        return bool(
            await fleet.sql("select 1 from hosts where heartbeat_at > %s + interval '3 s'", before[0])
        )

    await eventually(beaten_twice, what="two beats of the host")
    assert (await run(http, path, "cat file"))["stdout"] == "kept\n"


async def test_a_tenant_has_so_many_sandboxes_and_no_more(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """429 with Retry-After, for all its users together; one less and there is room. Breaks when the count is left out."""
    await fleet.sql("update tenants set max_sandboxes = 1 where tenant = 'acme'")
    try:
        path = await make(http)
        async with fleet.http(fleet.bob) as bob:
            refused = await bob.post("/sandboxes", json={})
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_sandboxes")
            assert int(refused.headers["retry-after"]) > 0
            await http.delete(path)
            await make(bob)
    finally:
        await fleet.sql("update tenants set max_sandboxes = null")


async def test_full_hosts_are_said_at_once(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """503 with Retry-After, and nothing is left of the wish. Breaks when a host's room is not asked for."""
    await make(http)
    (before,) = await fleet.sql("select most from hosts")
    await fleet.sql("update hosts set most = 1, sandboxes = 1")
    refused = await http.post("/sandboxes", json={})
    assert (refused.status_code, refused.json()["code"]) == (503, "no_room"), refused.text
    assert int(refused.headers["retry-after"]) > 0
    await fleet.sql("update hosts set most = %s", before[0])
    assert len((await http.get("/sandboxes")).json()) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"template": "unknown"}, "template"),
        ({"template": 1}, "template"),
        ({"ttl_s": 100_000}, "ttl_s"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": "\x00"}}, "metadata"),
        ({"snapshot_id": "x"}, "snapshot_id"),
    ],
)
async def test_a_wish_that_cannot_be_is_refused_by_its_field(
    http: httpx.AsyncClient, body: dict[str, object], field: str
) -> None:
    refused = await http.post("/sandboxes", json=body)
    assert refused.status_code == 422, refused.text
    assert refused.json()["detail"].startswith(field)


async def test_without_the_hosts_key_the_answer_says_what_to_set(fleet: Fleet) -> None:
    """Never 401: the caller's key is good."""
    for secret in ("", "another"):
        settings = {**fleet.settings, "host_secret": secret}
        async with serve(create_app(make_settings(**settings))) as url:
            headers = {"x-api-key": fleet.alice}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                refused = await http.post("/sandboxes", json={})
                assert (refused.status_code, refused.json()["code"]) == (503, "sandbox_host_unavailable")
                assert "SANDFLEET_HOST_SECRET" in refused.json()["detail"]
                assert (await http.get("/sandboxes")).json() == []


async def test_a_creation_that_is_sent_again_makes_nothing_new(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Copies at once, and one later. Red when the key is not looked up under the tenant's lock, or is not kept."""
    headers = {"idempotency-key": uuid.uuid4().hex}
    copies = [http.post("/sandboxes", json={"ttl_s": 90}, headers=headers) for _ in range(4)]
    answers = [
        *await asyncio.gather(*copies),
        await http.post("/sandboxes", json={"ttl_s": 90}, headers=headers),
    ]
    assert {answer.status_code for answer in answers} == {201}, [answer.text for answer in answers]
    assert len({answer.json()["sandbox_id"] for answer in answers}) == 1
    assert await fleet.sql("select count(*) from sandboxes") == [(1,)]
    other = await http.post("/sandboxes", json={"ttl_s": 91}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "conflict")
    await http.delete(answers[0].headers["location"])
    ended = await http.post("/sandboxes", json={"ttl_s": 90}, headers=headers)
    assert (ended.status_code, ended.json()["detail"]) == (
        409,
        "The sandbox that this Idempotency-Key had created has ended.",
    )


async def test_a_copy_that_fails_leaves_what_another_has_made(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Red when a failed creation is taken back by its id alone: the sandbox would go that the other copy's caller works in."""
    idempotency_key = uuid.uuid4().hex
    made = await http.post("/sandboxes", json={}, headers={"idempotency-key": idempotency_key})
    key = RunKey("acme", "alice", uuid.UUID(made.json()["sandbox_id"]))
    async with open_pool(fleet.host.database_url, 1) as pool:
        await sandboxes.take_back(pool, key, idempotency_key)
    assert (await http.get(made.headers["location"])).status_code == 200
    again = await http.post("/sandboxes", json={}, headers={"idempotency-key": idempotency_key})
    assert again.json()["sandbox_id"] == made.json()["sandbox_id"]


async def test_a_sandbox_lives_as_long_as_it_is_told_anew(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Longer and shorter, within its template's lifetime. Red when the lifetime does not bound it, or others may change it."""
    path = await make(http, template="small", ttl_s=30)

    def ends_in(answer: httpx.Response) -> float:
        assert answer.status_code == 200, answer.text
        ends, now = answer.json()["expires_at"], answer.json()["created_at"]
        return (datetime.fromisoformat(ends) - datetime.fromisoformat(now)).total_seconds()

    assert 60 <= ends_in(await http.patch(path, json={"ttl_s": 60})) <= 120
    refused = await http.patch(path, json={"ttl_s": 121})
    assert (refused.status_code, "lifetime" in refused.json()["detail"]) == (422, True), refused.text
    async with fleet.http(fleet.bob) as bob:
        assert (await bob.patch(path, json={"ttl_s": 60})).status_code == 404
    await http.patch(path, json={"ttl_s": 0.001})
    await gone(fleet)
    assert (await http.patch(path, json={"ttl_s": 60})).status_code == 404


async def test_a_query_that_is_not_honoured_is_refused(http: httpx.AsyncClient) -> None:
    """Red when a misspelt ``append`` replaces the file that it was to be added to."""
    path = await make(http)
    for method, where, named in (
        ("GET", "/sandboxes?metadata=x", "POST /sandboxes/search"),
        (
            "GET",
            "/sandboxes?templat=x",
            "'templat' is no query parameter of this request: it takes limit, offset, ",
        ),
        ("GET", "/snapshots?of=x", "'of' is no query parameter"),
        (
            "PUT",
            f"{path}/file?path=x&apend=1",
            "'apend' is no query parameter of this request: it takes path, mode, ",
        ),
        ("DELETE", f"{path}/file?path=x&force=1", "'force' is no query parameter"),
        ("GET", f"{path}/processes/1/output?wait=1", "'wait' is no query parameter"),
    ):
        refused = await http.request(method, where)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
        assert named in refused.json()["detail"]


async def test_a_generation_that_was_never_there_is_no_loss(http: httpx.AsyncClient) -> None:
    """Red when such a request is told that the sandbox's host has restarted."""
    path = await make(http)
    for number in ("0", "9"):
        refused = await http.get(f"{path}/files", headers={"x-sandbox-generation": number})
        assert refused.status_code == 422
        assert "is in generation 1" in refused.json()["detail"]
    assert (await http.get(f"{path}/files", headers={"x-sandbox-generation": "1"})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "named"),
    [
        ("POST", "", {"ttl": 60}, "ttl"),
        ("PATCH", "/ID", {"ttl_s": 60, "metadata": {}}, "metadata"),
        ("POST", "/search", {"filter": {}}, "filter"),
        ("POST", "/ID/exec", {"command": "true", "timeout": 1}, "timeout"),
        ("POST", "/ID/exec/stream", {"command": "true", "pty": {"cols": 80}}, "pty.cols"),
        ("POST", "/ID/processes", {"command": "true", "timeout_s": 1}, "timeout_s"),
        ("POST", "/ID/processes/1/signal", {"signal": 9, "group": True}, "group"),
        ("POST", "/ID/processes/1/resize", {"cols": 80}, "cols"),
        ("POST", "/ID/glob", {"pattern": "*", "max": 1}, "max"),
        ("POST", "/ID/grep", {"pattern": "x", "case": False}, "case"),
        ("POST", "/ID/mkdir", {"path": "a", "parents": True}, "parents"),
        ("POST", "/ID/move", {"path": "a", "to": "b", "overwrite": True}, "overwrite"),
        ("POST", "/ID/copy", {"path": "a", "to": "b", "recursive": True}, "recursive"),
        ("POST", "/ID/fork", {"ttl": 60}, "ttl"),
        ("POST", "/ID/restore", {"snapshot_id": str(uuid.uuid4()), "wait": True}, "wait"),
    ],
)
async def test_an_unknown_field_is_refused_by_its_name(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any], named: str
) -> None:
    """Breaks when it is ignored: a command with ``timeout`` in place of ``timeout_s`` would have none of its caller's."""
    answer = await http.request(method, f"/sandboxes{path.replace('ID', str(uuid.uuid4()))}", json=body)
    assert (answer.status_code, answer.json()["detail"]) == (422, f"{named}: there is no such field")
