"""What a run is told by a command takes effect once, however many attempts it needs."""

from collections.abc import Callable
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt

from sandfleet.fleet.executor.execution import Execution
from sandfleet.shared.errors import Superseded
from tests.executor.conftest import Executor
from tests.waiting import eventually


class State(TypedDict, total=False):
    said: Annotated[list[Any], add]


class Deaths:
    """Lets the attempt that comes to it first be lost there, as if its executor had died."""

    def __init__(self) -> None:
        self.left = 1

    def strike(self) -> None:
        if self.left:
            self.left -= 1
            raise Superseded("The executor died here.")


def graph_of(nodes: dict[str, Callable[..., Any]], *edges: tuple[str, str]) -> Any:
    builder = StateGraph(State)
    for name, node in nodes.items():
        builder.add_node(name, node)
    for start, end in edges:
        builder.add_edge(start, end)
    return builder.compile()


def question(text: str) -> Callable[[State], State]:
    return lambda _: {"said": [(text, interrupt(text))]}


async def open_questions(executor: Executor, execution: Execution) -> dict[str, str]:
    """What the run's thread waits for: ids of interrupts by their questions. The run must have succeeded."""
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute(
            "select r.status, t.interrupts from runs r join threads t using (tenant, user_id, thread_id) where run_id = %s",
            (execution.run.fence.key.run_id,),
        )
        row = await cursor.fetchone()
    assert row is not None
    assert row[0] == "success"
    return {each["value"]: each["id"] for task in row[1].values() for each in task}


async def said(executor: Executor, execution: Execution) -> list[Any]:
    """What the newest state of the run's thread says."""
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute(
            """select "values" from state_snapshots where thread_id = %s and ns = '' order by seq desc limit 1""",
            (str(execution.run.thread_id),),
        )
        row = await cursor.fetchone()
    assert row is not None
    return list(row[0].get("said", []))


async def through_a_death(executor: Executor, graph: Any, **given: Any) -> Execution:
    """The second attempt of a run, which has ended; the first was lost in the middle."""
    first = await executor.claim(graph, **given)
    await first.execute()
    second = await executor.claim_again(first, graph)
    await second.execute()
    return second


async def test_an_answer_answers_its_own_question_only(executor: Executor) -> None:
    """The question was asked within a subgraph, which was at its next step when the executor died. Red when the answer,
    which LangGraph keeps at the parent's checkpoint, is there still: nobody would be asked whether to do the second thing."""
    deaths = Deaths()

    def second(state: State) -> State:
        deaths.strike()
        return question("delete it?")(state)

    nested = graph_of(
        {"first": question("look at it?"), "second": second},
        (START, "first"),
        ("first", "second"),
        ("second", END),
    )
    graph = graph_of({"nested": nested}, (START, "nested"), ("nested", END))
    asking = await executor.claim(graph)
    await asking.execute()
    thread = {"thread_id": asking.run.thread_id}
    answered = await through_a_death(executor, graph, command={"resume": "yes"}, **thread)
    assert list(await open_questions(executor, answered)) == ["delete it?"]
    going_on = await executor.claim(graph, input=None, **thread)
    await going_on.execute()
    assert list(await open_questions(executor, going_on)) == ["delete it?"]
    last = await executor.claim(graph, command={"resume": "no"}, **thread)
    await last.execute()
    assert await said(executor, last) == [["look at it?", "yes"], ["delete it?", "no"]]


async def test_an_answer_that_a_task_has_taken_is_not_given_to_its_next_question(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor died between the next question and the run's end. Red when what was taken is loaded again."""
    deaths = Deaths()

    def node(_: State) -> State:
        return {"said": [interrupt("first?"), interrupt("second?")]}

    graph = graph_of({"node": node}, (START, "node"), ("node", END))
    asking = await executor.claim(graph)
    await asking.execute()
    succeeded = Execution._succeeded

    async def dying(self: Execution, graph: Any) -> Any:
        deaths.strike()
        return await succeeded(self, graph)

    monkeypatch.setattr(Execution, "_succeeded", dying)
    answered = await through_a_death(executor, graph, command={"resume": 1}, thread_id=asking.run.thread_id)
    assert list(await open_questions(executor, answered)) == ["second?"]


async def test_answers_by_id_are_given_once(executor: Executor) -> None:
    """One of two was taken and its task had asked again when the executor died. Red when both are given again: LangGraph
    takes the first answer of a task for its next question's, too."""
    deaths = Deaths()

    def twice(_: State) -> State:
        return {"said": [interrupt("first?"), interrupt("second?")]}

    async def beside(_: State) -> State:
        answer = interrupt("beside?")
        if deaths.left:
            await eventually(lambda: asked_again(executor, asking), what="the second question")
        deaths.strike()
        return {"said": [answer]}

    graph = graph_of(
        {"twice": twice, "beside": beside},
        (START, "twice"),
        (START, "beside"),
        ("twice", END),
        ("beside", END),
    )
    asking = await executor.claim(graph)
    await asking.execute()
    thread = {"thread_id": asking.run.thread_id}
    ids = await open_questions(executor, asking)
    answers = {ids["first?"]: 1, ids["beside?"]: 3}
    answered = await through_a_death(executor, graph, command={"resume": answers}, **thread)
    assert list(await open_questions(executor, answered)) == ["second?"]
    last = await executor.claim(graph, command={"resume": 2}, **thread)
    await last.execute()
    assert await said(executor, last) == [3, 1, 2]


async def asked_again(executor: Executor, execution: Execution) -> Any:
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute(
            "select 1 from checkpoint_writes where thread_id = %s and slot = -4",
            (str(execution.run.thread_id),),
        )
        return await cursor.fetchone()


async def test_an_answer_that_nobody_had_taken_is_given_by_the_next_attempt(executor: Executor) -> None:
    """Red when a successor takes what was stored of a command for what was done."""
    deaths = Deaths()

    def node(_: State) -> State:
        answer = interrupt("first?")
        deaths.strike()
        return {"said": [answer]}

    graph = graph_of({"node": node}, (START, "node"), ("node", END))
    for by_id in (False, True):
        deaths.left = 1
        asking = await executor.claim(graph)
        await asking.execute()
        (question_id,) = (await open_questions(executor, asking)).values()
        command = {"resume": {question_id: "yes"} if by_id else "yes"}
        answered = await through_a_death(executor, graph, command=command, thread_id=asking.run.thread_id)
        assert await open_questions(executor, answered) == {}
        assert await said(executor, answered) == ["yes"]


async def test_an_update_by_a_command_is_made_once(executor: Executor) -> None:
    """The executor died in the step that it led to. Red when the successor gives the command again: LangGraph has stored
    its update before, and would make both."""
    deaths = Deaths()

    def node(state: State) -> State:
        deaths.strike()
        return {"said": ["node"]}

    graph = graph_of({"first": lambda _: {"said": ["first"]}, "node": node}, (START, "first"), ("node", END))
    before = await executor.claim(graph)
    await before.execute()
    command = {"update": {"said": ["updated"]}, "goto": "node"}
    told = await through_a_death(executor, graph, command=command, thread_id=before.run.thread_id)
    assert await said(executor, told) == ["first", "updated", "node"]
