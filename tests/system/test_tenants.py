"""Two users who may not see each other."""

import psycopg
import pytest
from langgraph_sdk import get_client
from langgraph_sdk.errors import NotFoundError

from sandfleet.shared.ids import Owner
from sandfleet.shared.store.api_keys import create_key


@pytest.fixture(params=["another tenant", "another user of the tenant"])
async def stranger(stack, request):
    """A client of somebody else."""
    async with await psycopg.AsyncConnection.connect(stack.info.database_url, autocommit=True) as connection:
        cursor = await connection.execute("select tenant from api_keys order by created_at limit 1")
        ((tenant,),) = await cursor.fetchall()
        owner = (
            Owner("stranger", "s") if request.param == "another tenant" else Owner(tenant, "somebody-else")
        )
        key = await create_key(connection, owner, "test")
    async with get_client(url=stack.info.api_url, api_key=key) as client:
        yield client


async def test_a_stranger_sees_nothing_of_a_run(client, stranger):
    """Red when a query goes by the id alone."""
    thread = await client.threads.create(metadata={"mine": "yes"})
    await client.runs.wait(thread["thread_id"], "counter", input={"steps": 1})
    (run,) = await client.runs.list(thread["thread_id"])
    ids = thread["thread_id"], run["run_id"]
    assert await stranger.threads.search(metadata={"mine": "yes"}) == []
    assert await stranger.threads.count(metadata={"mine": "yes"}) == 0
    for asked in (
        stranger.threads.get(ids[0]),
        stranger.threads.get_state(ids[0]),
        stranger.threads.get_history(ids[0]),
        stranger.threads.update(ids[0], metadata={}),
        stranger.threads.update_state(ids[0], {"done": [9]}),
        stranger.runs.list(ids[0]),
        stranger.runs.get(*ids),
        stranger.runs.cancel(*ids),
        stranger.runs.create(ids[0], "counter", input={}),
        stranger.runs.delete(*ids),
        stranger.threads.delete(ids[0]),
    ):
        with pytest.raises(NotFoundError):
            await asked
    with pytest.raises(Exception, match="404"):
        await stranger.runs.join(*ids)
    with pytest.raises(NotFoundError):
        [e async for e in stranger.runs.join_stream(*ids, last_event_id="0")]
    assert (await client.runs.get(*ids))["status"] == "success"
