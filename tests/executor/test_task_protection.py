"""An executor that is an ECS task protects itself while it executes runs. An HTTP server of ours stands for the ECS agent,
which runs on AWS alone: it takes what AWS documents for `PUT $ECS_AGENT_URI/task-protection/v1/state`."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from aiohttp import web

from sandfleet.fleet.executor import control, task_protection
from sandfleet.fleet.executor.control import Executor
from sandfleet.fleet.executor.task_protection import TaskProtection
from sandfleet.fleet.graphs.loading import Graph
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import new_id
from sandfleet.shared.scaling.load import retire
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.submission import submit
from sandfleet.shared.templates import read_templates
from tests.executor.test_execution import State, graph_of, step
from tests.gates.test_gates import pool, submission
from tests.waiting import eventually

__all__ = ["pool"]

PROTECT = {"ProtectionEnabled": True, "ExpiresInMinutes": 30}
GIVE_UP = {"ProtectionEnabled": False}
ARN = "arn:aws:ecs:eu-central-1:111122223333:task/fleet"


@dataclass
class Agent:
    """What was asked for, in order. ``refuses``: as AWS does when it throttles. ``hangs``: it does not answer."""

    uri: str = ""
    metadata_uri: str = ""
    asked: list[dict[str, object]] = field(default_factory=list)
    refuses: bool = False
    hangs: bool = False
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        if self.hangs:
            await self.let_go.wait()
        if self.refuses:
            return web.json_response({"error": {"Code": "ThrottlingException"}}, status=400)
        protection = {
            "ProtectionEnabled": self.asked[-1]["ProtectionEnabled"],
            "TaskArn": f"{ARN}/t-1",
        }
        return web.json_response({"protection": protection})


async def describe(_: web.Request) -> web.Response:
    return web.json_response({"TaskARN": f"{ARN}/t-1", "Family": "executor", "Revision": "3"})


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    agent = Agent()
    application = web.Application()
    application.router.add_put("/api/token/task-protection/v1/state", agent.answer)
    application.router.add_get("/v4/task", describe)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    agent.uri, agent.metadata_uri = f"http://{host}:{port}/api/token", f"http://{host}:{port}/v4"
    yield agent
    agent.let_go.set()
    await runner.cleanup()


class Work:
    """Whether runs are executed."""

    def __init__(self) -> None:
        self.now = False

    def __call__(self) -> bool:
        return self.now


async def test_it_is_asked_for_once_and_given_up_once(agent: Agent) -> None:
    """However often it is tended. Red when each tending asks, or an idle task that never had it gives it up."""
    work = Work()
    protection = TaskProtection(agent.uri, work, idle_s=0.0)
    await protection.protect_the_task()
    work.now = True
    for _ in range(5):
        await protection.protect_the_task()
    work.now = False
    for _ in range(5):
        await protection.protect_the_task()
    assert agent.asked == [PROTECT, GIVE_UP]


async def test_a_moment_without_runs_gives_nothing_up(agent: Agent) -> None:
    """Red when short runs make it a call of the agent each."""
    work = Work()
    protection = TaskProtection(agent.uri, work, idle_s=3600.0)
    for now in (True, False, True, False):
        work.now = now
        await protection.protect_the_task()
    assert agent.asked == [PROTECT]


async def test_it_is_renewed_before_it_expires(agent: Agent) -> None:
    """Red when a long run outlives its protection."""
    work = Work()
    work.now = True
    protection = TaskProtection(agent.uri, work, renew_s=0.0)
    await protection.protect_the_task()
    await protection.protect_the_task()
    assert agent.asked == [PROTECT, PROTECT]
    assert task_protection._RENEW_S < task_protection._EXPIRES_MIN * 60 / 2


async def test_a_refusal_is_tried_again_after_a_pause(agent: Agent) -> None:
    """Red when it counts as protected, or when each tending asks an agent that is throttled."""
    work = Work()
    work.now = True
    agent.refuses = True
    patient = TaskProtection(agent.uri, work, try_again_s=3600.0)
    with pytest.raises(Exception, match="400"):
        await patient.protect_the_task()
    await patient.protect_the_task()
    assert agent.asked == [PROTECT]
    eager = TaskProtection(agent.uri, work, try_again_s=0.0)
    with pytest.raises(Exception, match="400"):
        await eager.protect_the_task()
    agent.refuses = False
    await eager.protect_the_task()
    await eager.protect_the_task()
    assert agent.asked == [PROTECT] * 3


async def test_an_executor_protects_its_task_while_it_executes_a_run(
    agent: Agent, pool: Pool, database: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the executor does not tend it, or takes an idle task for a busy one."""
    monkeypatch.setattr(control, "TaskProtection", partial(TaskProtection, idle_s=0.0))
    go_on = threading.Event()  # graphs have a loop of their own

    async def waits(state: State) -> State:
        await eventually(go_on.is_set, 60, "leave to end")
        return await step(state)

    made = executor(agent, database, redis_url, waits)
    running = asyncio.create_task(made.run())
    await submit(pool, replace(submission("flood", new_id()), kwargs='{"input": {}}'))
    await eventually(lambda: agent.asked == [PROTECT], 60, "protection")
    go_on.set()
    await eventually(lambda: agent.asked == [PROTECT, GIVE_UP], 60, "protection is given up")
    made.drain()
    await running


async def test_a_replaced_executor_gives_its_task_up_while_it_works(
    agent: Agent, pool: Pool, database: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that ECS tells it to stop, and it hands over what it does not finish. Red when it waits for the ends of its runs,
    which hold up a deployment for as long as they last; or when it does not say which task it is."""
    monkeypatch.setattr(control, "TaskProtection", partial(TaskProtection, idle_s=0.0))
    go_on = threading.Event()

    async def waits(state: State) -> State:
        await eventually(go_on.is_set, 120, "leave to end")
        return await step(state)

    made = executor(agent, database, redis_url, waits)
    running = asyncio.create_task(made.run())
    await submit(pool, replace(submission("flood", new_id()), kwargs='{"input": {}}'))
    await eventually(lambda: agent.asked == [PROTECT], 60, "protection")
    async with pool.connection() as connection:
        cursor = await connection.execute("select pool, task from executors")
        ((of, task),) = await cursor.fetchall()
        assert task == "t-1"
        await retire(connection, of, 1, 600, {"a-new-one"})
    await eventually(lambda: agent.asked == [PROTECT, GIVE_UP], 60, "protection is given up")
    assert not go_on.is_set()
    go_on.set()
    made.drain()
    await running


async def test_an_agent_that_does_not_answer_holds_nothing_up(
    agent: Agent, pool: Pool, database: str, redis_url: str
) -> None:
    """Runs begin and end as ever, and the executor drains. Red when something waits for the agent."""
    agent.hangs = True

    async def asks(state: State) -> State:
        await eventually(lambda: agent.asked, 60, "the agent is asked")
        return await step(state)

    made = executor(agent, database, redis_url, asks)
    running = asyncio.create_task(made.run())
    await submit(pool, replace(submission("flood", new_id()), kwargs='{"input": {}}'))

    async def ended() -> bool:
        async with pool.connection() as connection:
            cursor = await connection.execute("select count(*) from runs where status = 'success'")
            row = await cursor.fetchone()
        return row == (1,)

    await eventually(ended, 60, "the run has ended")
    assert agent.asked == [PROTECT]
    made.drain()
    await running


def executor(agent: Agent, database: str, redis_url: str, node: object) -> Executor:
    settings = Settings(
        database_url=database,
        redis_url=redis_url,
        slots=2,
        drain_grace_s=0.0,
        ecs_agent_uri=agent.uri,
        ecs_metadata_uri=agent.metadata_uri,
    )
    return Executor(settings, {"g": Graph("g", graph_of(node))}, read_templates(settings))


@pytest.fixture(autouse=True)
def no_top_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TOP_UP_EVERY_S", 3600.0)
