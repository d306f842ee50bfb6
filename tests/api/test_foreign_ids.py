"""Nobody sees another user's things: every route, tried with the other's ids, answers as if there were nothing."""

import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.api.conftest import Api

CHECKPOINT = "1ef4a9b8-e6fb-67b1-8001-abd5184439d1"
# Bodies that are valid, so that nothing but the ids can be wrong.
_RUN = {"assistant_id": "chat"}
_BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/threads/{thread_id}/runs"): _RUN,
    ("POST", "/threads/{thread_id}/runs/stream"): _RUN,
    ("POST", "/threads/{thread_id}/runs/wait"): _RUN,
    ("PATCH", "/threads/{thread_id}"): {"metadata": {"stolen": True}},
    ("POST", "/threads/{thread_id}/state"): {"values": {"stolen": True}},
    ("POST", "/threads/{thread_id}/state/checkpoint"): {"checkpoint": {"checkpoint_ns": ""}},
    ("POST", "/assistants/{assistant_id}/latest"): {"version": 1},
    ("PATCH", "/assistants/{assistant_id}"): {"name": "stolen"},
    ("PATCH", "/sandboxes/{sandbox_id}"): {"ttl_s": 60},
    ("POST", "/sandboxes/{sandbox_id}/exec"): {"command": "true"},
    ("POST", "/sandboxes/{sandbox_id}/exec/stream"): {"command": "true"},
    ("POST", "/sandboxes/{sandbox_id}/processes"): {"command": "true"},
    ("POST", "/sandboxes/{sandbox_id}/processes/{process}/signal"): {"signal": 9},
    ("POST", "/sandboxes/{sandbox_id}/glob"): {"pattern": "*"},
    ("POST", "/sandboxes/{sandbox_id}/grep"): {"pattern": "x"},
    ("POST", "/sandboxes/{sandbox_id}/mkdir"): {"path": "stolen"},
    ("POST", "/sandboxes/{sandbox_id}/move"): {"path": "a", "to": "b"},
    ("POST", "/sandboxes/{sandbox_id}/copy"): {"path": "a", "to": "b"},
    ("POST", "/sandboxes/{sandbox_id}/restore"): {"snapshot_id": CHECKPOINT},
}


def routes_with_ids(app: FastAPI) -> list[tuple[str, str]]:
    """Every route that names something by an id."""
    return [
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if "{" in path
    ]


@pytest.mark.parametrize("intruder", ["bob", "eve"])
async def test_every_route_answers_404_to_a_foreign_id(api: Api, intruder: str) -> None:
    """`bob` is of the same tenant, `eve` of another. Nothing of alice's has changed afterwards.

    Breaks when any statement leaves `user_id` or `tenant` out of its condition.
    """
    async with api.client() as alice:
        assistant = await alice.assistants.create("chat", name="mine")
        thread = (await alice.threads.create(metadata={"mine": True}))["thread_id"]
        done = await alice.runs.create(thread, "chat")
        run = await api.executor.claim(done["run_id"])
        await api.executor.snapshot(run, CHECKPOINT, {"secret": 1})
        await api.executor.finish(run, 1)
        made = await alice.runs.create(thread, "chat", after_seconds=3600)
        ids = {
            "{thread_id}": thread,
            "{run_id}": made["run_id"],
            "{assistant_id}": assistant["assistant_id"],
            "{checkpoint_id}": CHECKPOINT,
            "{sandbox_id}": await _sandbox(api),
            "{process}": "1",
            "{snapshot_id}": await _snapshot(api, made["run_id"]),
        }
        before = await _everything(api)
        routes = routes_with_ids(api.app)
        assert len(routes) > 25
        async with api.http(getattr(api, intruder)) as http:
            for method, template in routes:
                path = template
                for placeholder, value in ids.items():
                    path = path.replace(placeholder, value)
                assert "{" not in path, "a placeholder without an id in this test"
                body = _BODIES.get((method, template), {})
                params = {"path": "/x"} if template.rsplit("/", 1)[1] in ("file", "files", "stat") else {}
                answer = await http.request(method, path, params=params, content=json.dumps(body))
                assert answer.status_code == 404, (method, template, answer.status_code, answer.text)
                assert "secret" not in answer.text
            own = (await http.post("/threads", json={})).json()["thread_id"]
            for method, template in routes:
                if "{run_id}" in template and "{thread_id}" in template:
                    path = template.replace("{thread_id}", own).replace("{run_id}", made["run_id"])
                    assert (await http.request(method, path)).status_code == 404, (method, template)
            for body in (
                {"thread_id": thread, "run_ids": [made["run_id"]]},
                {"thread_id": own, "run_ids": [made["run_id"]]},
            ):
                assert (await http.post("/runs/cancel", json=body)).status_code == 404
            assert (await http.post("/runs/cancel", json={"status": "all"})).status_code == 204
            pruned = await http.post("/threads/prune", json={"thread_ids": [thread]})
            assert pruned.json() == {"pruned_count": 0}
            found = await http.post("/threads/search", json={"ids": [thread]})
            assert found.json() == []
            found = await http.post("/threads/search", json={"metadata": {"mine": True}})
            assert found.json() == []
            assert (await http.post("/threads/count", json={"values": {"secret": 1}})).json() == 0
            assert (await http.post("/assistants/count", json={"name": "mine"})).json() == 0
            assert (await http.get("/sandboxes")).json() == []
            found = await http.post("/sandboxes/search", json={"metadata": {"mine": True}})
            assert found.json() == []
            assert (await http.get("/snapshots")).json() == []
            begun = await http.post("/sandboxes", json={"snapshot_id": ids["{snapshot_id}"]})
            assert begun.status_code == 404
            run_of_theirs = await http.post("/runs", json={"assistant_id": assistant["assistant_id"]})
            assert run_of_theirs.status_code == 404
            await http.delete(f"/threads/{own}")
        assert await _everything(api) == before


async def _sandbox(api: Api) -> str:
    """A sandbox of alice's. There is no host: whoever gets beyond its id is answered 503."""
    rows = await api.sql(
        """insert into sandboxes (tenant, user_id, sandbox_id, template, metadata, expires_at)
           values ('acme', 'alice', gen_random_uuid(), 'default', '{"mine": true}', clock_timestamp() + interval '1 h')
           returning sandbox_id"""
    )
    await api.sql(
        """insert into placements (tenant, user_id, run_id, template, memory, pids, sandbox_id)
           values ('acme', 'alice', %s, 'default', 1, 1, 'abc')""",
        rows[0][0],
    )
    return str(rows[0][0])


async def _snapshot(api: Api, run_id: str) -> str:
    """A snapshot of the sandbox of a run of alice's."""
    rows = await api.sql(
        """insert into snapshots (tenant, user_id, snapshot_id, run_id, reason, object_key, bytes, files, content_bytes,
                                  skipped, expires_at)
           values ('acme', 'alice', gen_random_uuid(), %s, 'request', 'key', 1, 1, 1, 0, clock_timestamp() + interval '1 h')
           returning snapshot_id""",
        run_id,
    )
    return str(rows[0][0])


async def _everything(api: Api) -> list[Any]:
    return [
        await api.sql(f"select * from {table} where user_id = 'alice' order by 1, 2, 3, 4")
        for table in (
            "threads",
            "runs",
            "assistants",
            "assistant_versions",
            "state_snapshots",
            "idempotency_keys",
            "sandboxes",
            "placements",
            "snapshots",
        )
        if table != "threads"
    ] + [
        await api.sql(
            "select thread_id, metadata::text, status, active_run, updated_at from threads where user_id = 'alice' order by 1"
        )
    ]
