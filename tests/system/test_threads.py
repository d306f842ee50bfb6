"""Many clients on one thread, through two API processes and two executors: strategies, resumes, cancels, children."""

import asyncio
import itertools
from contextlib import AsyncExitStack

import psycopg
import pytest
from langgraph_sdk import get_client
from langgraph_sdk.errors import ConflictError, NotFoundError

from sandfleet.localstack.deployment_check import check_stack
from tests.fixtures_stack import start_stack
from tests.waiting import eventually


@pytest.fixture(scope="module")
async def stack(engine):
    """A stack of this module's own, with two API processes."""
    started = await start_stack(engine, "threads", executors=2, apis=2)
    yield started
    await started.stop()


@pytest.fixture(scope="module")
async def both(stack):
    """A client of each API process."""
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(get_client(url=url, api_key=stack.info.api_key))
            for url in stack.info.api_urls
        ]


@pytest.fixture
async def clients(stack, both):
    """Both clients; after the test, the deployment is as it must be."""
    yield both

    async def clean():
        return (await check_stack(stack.info)).violations == []

    await eventually(clean, 60, "no violation")


async def submit_many(clients, thread_id, count, graph, **given):
    """Create runs through both processes at once; returns the accepted runs, and how many were refused."""
    answers = await asyncio.gather(
        *(clients[n % 2].runs.create(thread_id, graph, **given) for n in range(count)), return_exceptions=True
    )
    runs = [answer for answer in answers if isinstance(answer, dict)]
    refused = [answer for answer in answers if isinstance(answer, ConflictError)]
    assert len(runs) + len(refused) == count, answers
    return runs, len(refused)


async def status_of(client, run):
    """The run's status, or None when it is gone."""
    try:
        return (await client.runs.get(run["thread_id"], run["run_id"]))["status"]
    except NotFoundError:
        return None


async def ended(client, runs):
    """Statuses when none of the runs goes on any more."""

    async def all_over():
        found = [await status_of(client, run) for run in runs]
        return found if not {"pending", "running"} & set(found) else None

    return await eventually(all_over, 90, "the end of all runs")


async def busy_thread(clients, **given):
    """A thread on which a slow run goes on."""
    thread = await clients[0].threads.create()
    run = await clients[0].runs.create(thread["thread_id"], "slow", input={"seconds": 60}, **given)

    async def begun():
        return await status_of(clients[0], run) == "running"

    await eventually(begun, 30, "the first run")
    return thread["thread_id"], run


async def test_reject_lets_one_run_in(clients):
    """Red when two processes accept one each."""
    thread = await clients[0].threads.create()
    runs, refused = await submit_many(
        clients, thread["thread_id"], 12, "slow", input={"seconds": 0.5}, multitask_strategy="reject"
    )
    assert (len(runs), refused) == (1, 11)
    assert await ended(clients[1], runs) == ["success"]


async def test_enqueued_runs_go_one_after_the_other(clients):
    """Each sees what those before it did. Red when two run at once, or one is lost: the steps would not add up."""
    thread = await clients[0].threads.create()
    runs, _ = await submit_many(
        clients,
        thread["thread_id"],
        8,
        "counter",
        input={"steps": 3, "delay_ms": 1},
        multitask_strategy="enqueue",
    )
    assert await ended(clients[0], runs) == ["success"] * 8
    times = sorted(
        [
            [
                (await clients[0].http.get(f"/runs/{run['run_id']}/timing"))[name]
                for name in ("started_at", "finished_at")
            ]
            for run in runs
        ]
    )
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("strategy", ["interrupt", "rollback"])
async def test_the_newest_of_many_runs_has_the_thread(clients, strategy):
    """Red when one that was interrupted goes on, or is executed after all; or the last one does not start."""
    thread_id, first = await busy_thread(clients)
    runs, refused = await submit_many(
        clients, thread_id, 10, "slow", input={"seconds": 600}, multitask_strategy=strategy
    )
    assert refused == 0
    gone = "interrupted" if strategy == "interrupt" else None

    async def only_one():
        found = {run["run_id"]: await status_of(clients[1], run) for run in runs}
        left = [run_id for run_id, status in found.items() if status == "running"]
        return left if list(found.values()).count(gone) == 9 else None

    (newest,) = await eventually(only_one, 90, "the newest run alone")
    assert await ended(clients[1], [first]) == [gone]
    await clients[0].runs.cancel(thread_id, newest)
    await ended(clients[1], runs)


async def test_an_interrupted_thread_is_resumed_once(clients):
    """However many ask. Red when the node behind the interrupt runs again for a later resume: its answer would be another."""
    thread = await clients[0].threads.create()
    thread_id = thread["thread_id"]
    await clients[0].runs.wait(thread_id, "approve", input={"question": "?"})
    answers = await asyncio.gather(
        *(clients[n % 2].runs.create(thread_id, "approve", command={"resume": n}) for n in range(8))
    )
    await ended(clients[1], answers)
    history = await clients[0].threads.get_history(thread_id, limit=100)
    written = [state["values"].get("answer") for state in reversed(history) if "answer" in state["values"]]
    assert len(set(written)) == 1, written
    state = await clients[1].threads.get_state(thread_id)
    assert (state["values"]["asked"], state["next"]) == (1, [])


async def test_a_run_is_cancelled_twice_and_after_its_end(clients):
    """Red when the second cancel fails while the run still goes on, or the third finds a run that is over."""
    thread_id, run = await busy_thread(clients)
    await asyncio.gather(
        *(client.runs.cancel(thread_id, run["run_id"]) for client in clients * 3), return_exceptions=True
    )
    assert await ended(clients[0], [run]) == ["interrupted"]
    for client in clients:
        with pytest.raises(NotFoundError):
            await client.runs.cancel(thread_id, run["run_id"])
    assert (await clients[0].threads.get(thread_id))["status"] == "interrupted"


@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "running"])
async def test_a_run_that_is_rolled_back_was_never_there(clients, begun):
    """The answer to a cancel with ``wait`` comes after it. Red when the thread stays busy, or keeps a state of the run."""
    if begun:
        thread_id, run = await busy_thread(clients)
    else:
        thread_id = (await clients[0].threads.create())["thread_id"]
        run = await clients[0].runs.create(thread_id, "slow", input={"seconds": 60}, after_seconds=600)
    await clients[1].runs.cancel(thread_id, run["run_id"], wait=True, action="rollback")
    assert await status_of(clients[0], run) is None
    assert (await clients[0].threads.get(thread_id))["status"] == "idle"
    assert await clients[0].threads.get_history(thread_id) == []


async def test_children_on_other_executors_are_cancelled_with_their_parent(clients, stack):
    """Red when only the run itself is told."""
    thread_id, parent = await busy_thread(clients)
    header = {"X-Parent-Run-Id": parent["run_id"]}
    children = [
        await clients[n % 2].runs.create(
            None, "slow", input={"seconds": 60}, on_completion="keep", headers=header
        )
        for n in range(6)
    ]
    header = {"X-Parent-Run-Id": children[0]["run_id"]}
    children.append(
        await clients[1].runs.create(
            None, "slow", input={"seconds": 60}, on_completion="keep", headers=header
        )
    )

    async def all_running():
        return {await status_of(clients[0], run) for run in children} == {"running"}

    await eventually(all_running, 60, "all children")
    async with await psycopg.AsyncConnection.connect(stack.info.database_url) as connection:
        cursor = await connection.execute(
            "select count(distinct lease_owner) from runs where status = 'running'"
        )
        assert await cursor.fetchone() == (2,)
    await clients[0].runs.cancel(thread_id, parent["run_id"], wait=True)
    assert await ended(clients[1], [parent, *children]) == ["interrupted"] * 8
