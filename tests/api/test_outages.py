"""What callers see while PostgreSQL or Redis is away."""

import asyncio
import socket

import httpx
import pytest

from sandfleet.functions.api.app import create_app
from sandfleet.shared.db.pool import open_pool
from tests.api.conftest import Api, make_settings, serve
from tests.streams.wire import open_wire
from tests.waiting import eventually


@pytest.fixture
def nobody() -> str:
    """Host and port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_without_postgresql_the_answer_is_503_with_retry_after(
    api: Api, redis_url: str, nobody: str
) -> None:
    """The process starts all the same, says that it is alive, and that it is not ready."""
    app = create_app(make_settings(f"postgresql://postgres@{nobody}/none", redis_url))
    app.state.resources.pool.timeout = 0.2
    async with serve(app) as url, httpx.AsyncClient(base_url=url, headers={"x-api-key": api.alice}) as http:
        answer = await http.post("/threads", json={})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert (await http.get("/ok")).status_code == 200
        ready = await http.get("/system/ready")
        assert ready.status_code == 503
        assert "database" in ready.json()["missing"][0]


async def test_without_redis_runs_are_accepted_streamed_and_cancelled(
    api: Api, database: str, nobody: str
) -> None:
    """PostgreSQL is the only authority: everything that is journalled arrives, a little later."""
    app = create_app(make_settings(database, f"redis://{nobody}/0"))
    async with (
        serve(app) as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": api.alice}, timeout=30) as http,
    ):
        thread = (await http.post("/threads", json={})).json()["thread_id"]

        async def work() -> None:
            run = await api.executor.claim()
            await api.executor.emit(run, 1, "updates", {})
            await api.executor.finish(run, 2)

        working = asyncio.ensure_future(work())
        streamed = await http.post(f"/threads/{thread}/runs/stream", json={"assistant_id": "chat"})
        await working
        names = [line[7:] for line in streamed.text.split("\r\n") if line.startswith("event: ")]
        assert names == ["metadata", "updates", "end"]
        made = (await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat"})).json()["run_id"]
        run = await api.executor.claim(made)
        assert (await http.post(f"/threads/{thread}/runs/{made}/cancel")).status_code == 202
        assert await api.sql("select cancel_action from runs where run_id = %s", made) == [("interrupt",)]
        await api.executor.finish(run, 1, status="interrupted")


@pytest.mark.parametrize("buffered", [False, True], ids=["on a server", "on a Lambda"])
async def test_a_postgresql_that_hangs_is_given_up(
    api: Api, database: str, redis_url: str, buffered: bool
) -> None:
    """503, and all is well once it answers again. On a Lambda each request begins with a check of its connection.

    Red when a statement, or the check, has no limit: the request hangs with it.
    """
    async with open_wire(database) as (wire, through):
        app = create_app(make_settings(through, redis_url), buffered=buffered)
        pool = app.state.resources.pool
        pool.limit_s, pool.timeout = 0.5, 1.0
        async with (
            serve(app) as url,
            httpx.AsyncClient(base_url=url, headers={"x-api-key": api.alice}, timeout=60) as http,
        ):
            assert (await http.post("/threads", json={})).status_code == 200
            wire.silence()
            during = await asyncio.gather(*(http.post("/threads", json={}) for _ in range(20)))
            assert {answer.status_code for answer in during} == {503}
            assert {answer.headers["retry-after"] for answer in during} == {"1"}
            await wire.mend()

            async def well() -> bool:
                return (await http.post("/threads", json={})).status_code == 200

            await eventually(well)


async def test_a_redis_that_hangs_delays_no_submit(api: Api, database: str, redis_url: str) -> None:
    """Red when nothing limits a ring: what is to be sent after it, and the end of the process, wait for ever."""
    async with open_wire(redis_url) as (wire, through):
        app = create_app(make_settings(database, through))
        async with (
            serve(app) as url,
            httpx.AsyncClient(base_url=url, headers={"x-api-key": api.alice}, timeout=60) as http,
        ):
            wire.silence()
            answers = [await http.post("/runs", json={"assistant_id": "chat"}) for _ in range(3)]
            assert {answer.status_code for answer in answers} == {200}
            await asyncio.wait_for(app.state.resources.waker.flush(), 30)


async def test_a_pool_keeps_knocking_at_a_database_that_is_away(nobody: str) -> None:
    """About once a second however long it lasts, so that the API is back soon after the database. Red with the pool's own
    pauses, which double: the sixth attempt comes after half a minute."""
    async with open_wire(f"postgresql://postgres@{nobody}/none") as (wire, through):
        pool = open_pool(through, 2)
        await pool.open()
        try:
            await eventually(lambda: wire.accepted >= 6, 25, "six attempts to connect")
        finally:
            await pool.close()
