"""Sandboxes without a run: made, found, used and ended."""

import httpx

from tests.sandboxes.conftest import Fleet
from tests.waiting import eventually


async def test_a_sandbox_from_its_begin_to_its_end(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Made, found, used, removed."""
    made = await http.post("/sandboxes", json={"metadata": {"for": "me"}, "ttl_s": 100})
    assert made.status_code == 201, made.text
    sandbox = made.json()
    path = f"/sandboxes/{sandbox['sandbox_id']}"
    assert made.headers["location"] == path
    assert (await http.get(path)).json() == sandbox
    assert (await http.get("/sandboxes")).json() == [sandbox]
    ran = await http.post(f"{path}/exec", json={"command": "echo hello; echo oops >&2; exit 3"})
    assert ran.status_code == 200, ran.text
    assert (ran.json()["stdout"], ran.json()["stderr"], ran.json()["exit_code"]) == ("hello\n", "oops\n", 3)
    assert (await http.delete(path)).status_code == 204
    assert (await http.get(path)).status_code == 404
    assert (await http.post(f"{path}/exec", json={"command": "true"})).status_code == 404
    assert (await http.get("/sandboxes")).json() == []

    async def gone() -> bool:
        return (await fleet.host.health())["sandboxes"] == 0

    await eventually(gone, what="the host has removed it")
