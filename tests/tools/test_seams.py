"""However a graph calls its tools, the calls go through the ledger."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, ToolCall, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import RetryPolicy, interrupt

from sandfleet.fleet.tools import CallOrphaned, current_call
from tests.tools.conftest import Broken, Runs
from tests.waiting import eventually


class State(TypedDict, total=False):
    path: str
    results: list[Any]


def note(path: str, line: str) -> str:
    """Append a line to a file."""
    with Path(path).open("a") as file:
        file.write(line + "\n")
    return f"noted {line}"


@tool
async def later(path: str, line: str) -> str:
    """Append a line, on the event loop."""
    return note(path, line)


@tool
def now(path: str, line: str) -> str:
    """Append a line, wherever this is."""
    return note(path, line)


def one_node(node: Any, **options: Any) -> Any:
    """A graph of one node."""
    builder = StateGraph(State)
    builder.add_node("node", node, **options)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    return builder.compile()


async def awaits(state: State) -> State:
    return {"results": [await later.ainvoke({"path": state["path"], "line": line}) for line in "aab"]}


async def blocks_the_loop(state: State) -> State:
    return {"results": [now.invoke({"path": state["path"], "line": line}) for line in "aab"]}


def waits_in_its_thread(state: State) -> State:
    return {"results": [now.invoke({"path": state["path"], "line": line}) for line in "aab"]}


def has_a_loop_of_its_own(state: State) -> State:
    async def call() -> list[Any]:
        return [await later.ainvoke({"path": state["path"], "line": line}) for line in "aab"]

    return {"results": asyncio.run(call())}


async def blocks_the_loop_for_a_thread(state: State, config: RunnableConfig) -> State:
    def call(line: str) -> Any:
        return now.invoke({"path": state["path"], "line": line}, config)

    with ThreadPoolExecutor(1) as threads:
        return {"results": list(threads.map(call, "aab"))}


NODES = [awaits, blocks_the_loop, waits_in_its_thread, has_a_loop_of_its_own, blocks_the_loop_for_a_thread]


@pytest.mark.parametrize("node", NODES)
async def test_calls_that_a_node_makes_itself_are_recorded(runs: Runs, lines: Path, node: Any) -> None:
    """Red when only `ToolNode` is seen to, when equal calls of a node are one, or when a blocked loop is waited for."""
    graph = one_node(node)
    await runs.begin(input={"path": str(lines)})
    values = await runs.attempt(graph)
    assert values["results"] == ["noted a", "noted a", "noted b"]
    assert lines.read_text() == "a\na\nb\n"
    assert await runs.rows("execution", "status", "message_id") == [
        (0, "finished", None),
        (1, "finished", None),
        (0, "finished", None),
    ]


@pytest.mark.parametrize("node", [awaits, waits_in_its_thread, has_a_loop_of_its_own])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_nodes_own_calls_are_replayed(runs: Runs, lines: Path, node: Any, nth: int) -> None:
    """Red when the node's calls are counted differently in the replay."""
    graph = one_node(node)
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded", nth=nth)
    values = await runs.attempt(graph)
    assert values["results"] == ["noted a", "noted a", "noted b"]
    assert lines.read_text() == "a\na\nb\n"


async def calls_and_asks(state: State) -> State:
    said = await later.ainvoke({"path": state["path"], "line": "a"})
    interrupt("first")
    interrupt("second")
    return {"results": [said, note(state["path"], "b")]}


@pytest.mark.parametrize("ended", ["finished", "orphaned"])
async def test_a_task_that_goes_on_after_an_answer_repeats_no_call(
    runs: Runs, lines: Path, ended: str
) -> None:
    """A plain `ToolNode` has all calls of a message in one task. Red when the resumed run does not look into the ledger of
    the runs that it goes on from, or looks into the newest of them alone; a call whose end nobody saw is not made again."""
    begun = False

    async def kept() -> bool:
        return ("later", "finished") in await runs.rows()

    @tool
    async def approved(path: str, line: str) -> str:
        """Append a line when a person has answered twice."""
        if not begun:
            await eventually(kept, what="the other call has ended")
        interrupt("first")
        interrupt("second")
        return note(path, line)

    graph = asking(asks(("later", "a"), ("approved", "b")), ToolNode([later, approved]))
    await runs.begin(input={"path": str(lines)})
    await runs.attempt(graph)
    begun = True
    assert await runs.rows() == [("later", "finished")]
    if ended == "orphaned":
        await runs.connection.execute("update tool_calls set status = 'orphaned', outcome = null")
    for _ in range(2):
        await runs.begin(input=None, command={"resume": True})
        values = await runs.attempt(graph)
    assert lines.read_text() == "a\nb\n"
    told = values["messages"][-2].content
    assert told == "noted a" if ended == "finished" else "may or may not have taken effect" in told
    assert values["messages"][-1].content == "noted b"


async def test_a_node_that_asks_repeats_no_call_when_it_is_answered(runs: Runs, lines: Path) -> None:
    """Red when only the calls that a message asked for are known again."""
    graph = one_node(calls_and_asks)
    await runs.begin(input={"path": str(lines)})
    await runs.attempt(graph)
    for _ in range(2):
        await runs.begin(input=None, command={"resume": True})
        values = await runs.attempt(graph)
    assert values["results"] == ["noted a", "noted b"]
    assert lines.read_text() == "a\nb\n"


async def test_a_call_that_had_raised_is_made_again_by_a_run_that_goes_on(runs: Runs, lines: Path) -> None:
    """Somebody has mended what was wrong, and continues. Red when the old error is raised for ever."""
    broken = True

    @tool
    async def fragile(path: str, line: str) -> str:
        """Append a line, unless it is broken."""
        if broken:
            raise ValueError("broken")
        return note(path, line)

    async def node(state: State) -> State:
        return {
            "results": [
                await called.ainvoke({"path": state["path"], "line": line})
                for called, line in ((later, "a"), (fragile, "b"))
            ]
        }

    graph = one_node(node)
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(ValueError, match="broken"):
        await runs.attempt(graph)
    broken = False
    await runs.begin(input=None)
    values = await runs.attempt(graph)
    assert values["results"] == ["noted a", "noted b"]
    assert lines.read_text() == "a\nb\n"


async def test_a_nodes_own_call_that_was_broken_off_raises(runs: Runs, lines: Path) -> None:
    """Red when a plain result is made up, or the call is repeated."""
    graph = one_node(awaits)
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.effect_done")
    with pytest.raises(CallOrphaned, match="may or may not have taken effect"):
        await runs.attempt(graph)
    assert lines.read_text() == "a\n"


async def test_a_second_loss_changes_nothing(runs: Runs, lines: Path) -> None:
    """Red when an orphaned call is made again by the attempt after the next, or counts as one that has taken effect."""

    async def node(state: State) -> State:
        try:
            told = await later.ainvoke({"path": state["path"], "line": "a"})
        except CallOrphaned as orphaned:
            told = str(orphaned)
        return {"results": [told, await later.ainvoke({"path": state["path"], "line": "b"})]}

    graph = one_node(node)
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.effect_done")
    with pytest.raises(Broken):  # what the node was told of the first call is in no checkpoint
        await runs.attempt(graph, breaks_at="tool.before_ledger", nth=2)
    assert await runs.rows() == [("later", "orphaned")]
    values = await runs.attempt(graph)
    assert "may or may not have taken effect" in values["results"][0]
    assert lines.read_text() == "a\nb\n"


async def test_equal_calls_of_two_nodes_are_two(runs: Runs, lines: Path) -> None:
    """Red when the task is left out of a call's identity: the second node would get the result of the first one's call."""

    async def node(state: State) -> State:
        return {"results": [await later.ainvoke({"path": state["path"], "line": "a"})]}

    builder = StateGraph(State)
    for name in ("first", "second"):
        builder.add_node(name, node)
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", END)
    graph = builder.compile()
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.before_ledger", nth=2)
    await runs.attempt(graph)
    assert lines.read_text() == "a\na\n"


@pytest.mark.parametrize("in_message", [False, True], ids=["call", "message"])
async def test_a_node_that_asks_for_something_else_after_a_loss_is_told_of_the_doubt(
    runs: Runs, lines: Path, in_message: bool
) -> None:
    """A node that calls model and tool itself asks the model anew. Red when its other call is made as if nothing had
    been, or when the message is no part of a call's identity: it would get the answer of another question."""
    asked = iter("abc")

    async def node(state: State, config: RunnableConfig) -> State:
        line = next(asked)
        call = ToolCall(name="later", args={"path": state["path"], "line": line}, id="x", type="tool_call")
        if in_message:
            message = AIMessage("", tool_calls=[call], id=f"m{line}")
            (answer,) = (await ToolNode([later]).ainvoke({"messages": [message]}, config))["messages"]
        else:
            answer = await later.ainvoke(call)
        return {"results": [answer.content]}

    graph = one_node(node)
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded")
    values = await runs.attempt(graph)
    assert lines.read_text() == "a\n"
    assert "may or may not have taken effect" in values["results"][0]


def asks(*calls: tuple[str, str], message_id: str | None = "m") -> Any:
    """A node that makes an AI message with these (tool, line) calls, all with the id `call_1`."""

    def ask(state: Any) -> Any:
        made = [
            ToolCall(name=name, args={"path": state["path"], "line": line}, id="call_1", type="tool_call")
            for name, line in calls
        ]
        return {"messages": [AIMessage("", tool_calls=made, id=message_id)]}

    return ask


class Asking(MessagesState):
    path: str


def asking(ask: Any, tools: Any, schema: Any = Asking, **options: Any) -> Any:
    """A graph that asks and then runs the tools."""
    builder = StateGraph(schema)
    builder.add_node("ask", ask)
    builder.add_node("tools", tools, **options)
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "tools")
    builder.add_edge("tools", END)
    return builder.compile()


async def test_a_node_that_is_tried_again_repeats_only_what_failed(runs: Runs, lines: Path) -> None:
    """LangGraph's retry policy. Red when the call that succeeded is made again, or the failure is played back."""
    tries = []

    async def kept() -> bool:
        return ("later", "finished") in await runs.rows()

    @tool
    async def flaky(path: str, line: str) -> str:
        """Fail once."""
        while not lines.read_text():  # the other call of the message comes first
            await asyncio.sleep(0.01)
        tries.append(line)
        if len(tries) == 1:
            await eventually(kept, what="the other call has ended")
            raise ConnectionError("once")
        return note(path, line)

    nodes = ToolNode([later, flaky])
    graph = asking(
        asks(("later", "a"), ("flaky", "b")), nodes, retry_policy=RetryPolicy(initial_interval=0.01)
    )
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded", nth=3)
    values = await runs.attempt(graph)
    assert lines.read_text() == "a\nb\n"
    assert [m.content for m in values["messages"][1:]] == ["noted a", "noted b"]
    assert sorted(await runs.rows("name", "execution", "status")) == [
        ("flaky", 0, "failed"),
        ("flaky", 1, "finished"),
        ("later", 0, "finished"),
    ]
    assert len(tries) == 2


async def test_a_wrapper_may_call_a_tool_several_times(runs: Runs, lines: Path) -> None:
    """Middleware that tries again. Red when the second execution is taken for the first, or a replay repeats either."""
    keys = []

    @tool
    async def flaky(path: str, line: str) -> str:
        """Fail once."""
        keys.append(current_call().idempotency_key)
        note(path, f"{line}{len(keys)}")
        if len(keys) == 1:
            raise ConnectionError("once")
        return "done"

    async def insist(request: Any, execute: Any) -> Any:
        try:
            return await execute(request)
        except ConnectionError:
            return await execute(request)

    graph = asking(asks(("flaky", "a")), ToolNode([flaky], awrap_tool_call=insist))
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded", nth=2)
    values = await runs.attempt(graph)
    assert values["messages"][-1].content == "done"
    assert lines.read_text() == "a1\na2\n"
    assert len(set(keys)) == 1


async def test_calls_of_a_message_are_known_by_their_place_in_it(runs: Runs, lines: Path) -> None:
    """All of them `call_1`. Red when they are told apart by the order in which they begin, which is another one in the
    replay: each would get the other's result."""
    begins_first, has_ended = "a", asyncio.Event()

    async def in_turn(request: Any, execute: Any) -> Any:
        if request.tool_call["args"]["line"] != begins_first:
            await has_ended.wait()
        answer = await execute(request)
        has_ended.set()
        return answer

    graph = asking(asks(("later", "a"), ("later", "b")), ToolNode([later], awrap_tool_call=in_turn))
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded", nth=2)
    begins_first, has_ended = "b", asyncio.Event()
    values = await runs.attempt(graph)
    assert [m.content for m in values["messages"][1:]] == ["noted a", "noted b"]
    assert lines.read_text() == "a\nb\n"


async def test_messages_without_ids_will_do(runs: Runs, lines: Path) -> None:
    """A state that keeps a plain list gives its messages no ids. Red when such calls have no identity."""

    class Plain(TypedDict, total=False):
        path: str
        messages: list[AnyMessage]

    graph = asking(asks(("later", "a"), ("later", "b"), message_id=None), ToolNode([later]), Plain)
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded", nth=2)
    values = await runs.attempt(graph)
    assert [m.content for m in values["messages"]] == ["noted a", "noted b"]
    assert sorted(lines.read_text().split()) == ["a", "b"]
    assert {row[0] for row in await runs.rows("message_id")} == {"#0"}


@pytest.mark.parametrize("kept", [True, False])
async def test_a_tool_in_a_subgraph_is_called_once(runs: Runs, lines: Path, kept: bool) -> None:
    """A subgraph with checkpoints goes on where it was; one without begins anew, with new messages. Red when the former
    is in doubt about its next call, or the latter makes its call again."""

    def ask(state: Asking) -> Any:
        step = sum(isinstance(m, AIMessage) for m in state["messages"])
        args = {"path": state["path"], "line": "abc"[step]}
        return {
            "messages": [
                AIMessage("", tool_calls=[ToolCall(name="later", args=args, id="1", type="tool_call")])
            ]
        }

    def go_on(state: Asking) -> str:
        return "ask" if len(state["messages"]) < 4 else END

    builder = StateGraph(Asking)
    builder.add_node("ask", ask)
    builder.add_node("tools", ToolNode([later]))
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "tools")
    builder.add_conditional_edges("tools", go_on, ["ask", END])
    inner = builder.compile(checkpointer=None if kept else False)
    outer = StateGraph(Asking)
    outer.add_node("inner", inner)
    outer.add_edge(START, "inner")
    outer.add_edge("inner", END)
    graph = outer.compile()
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):  # the first of its two calls is in a checkpoint, if there are any
        await runs.attempt(graph, breaks_at="tool.before_ledger", nth=2)
    values = await runs.attempt(graph)
    answers = [m for m in values["messages"] if isinstance(m, ToolMessage)]
    if kept:
        assert lines.read_text() == "a\nb\n"
        assert [m.status for m in answers] == ["success", "success"]
    else:
        assert lines.read_text() == "a\n"
        assert [m.status for m in answers] == ["error", "error"]


async def test_a_replayed_call_shows_in_the_stream_as_any_other(runs: Runs, lines: Path) -> None:
    """Red when tool start and end events are missing because the tool does not run, or show what was injected."""
    graph = asking(asks(("later", "a")), ToolNode([later]))
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded")

    class Streamed:
        async def ainvoke(self, given: Any, config: Any, durability: Any) -> Any:
            return [
                event
                async for event in graph.astream(given, config, stream_mode="tools", durability=durability)
            ]

    events = await runs.attempt(Streamed())
    assert [e["event"] for e in events] == ["tool-started", "tool-finished"]
    assert events[0]["tool_name"] == "later"
    assert events[0]["input"]["line"] == "a"
    assert events[1]["output"].content == "noted a"
    assert lines.read_text() == "a\n"
