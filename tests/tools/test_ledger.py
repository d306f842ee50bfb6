"""What the ledger refuses, and what it keeps."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode
from langgraph.types import interrupt

from sandfleet.fleet.executor import tool_ledger
from sandfleet.fleet.executor.recorded_errors import ReplayedError, describe, rebuild
from sandfleet.fleet.executor.tool_ledger import ToolLedger
from sandfleet.fleet.sandbox.tools import sandbox_tools
from sandfleet.fleet.tools import current_call, is_idempotent
from sandfleet.shared.errors import Superseded
from tests.tools.conftest import OWNER, Broken, Runs
from tests.tools.test_seams import asking, asks, later, note, now, one_node
from tests.waiting import eventually


@pytest.mark.parametrize("slow", [False, True], ids=["before its start", "while its start is committed"])
@pytest.mark.parametrize("called", [later, now])
async def test_no_tool_starts_while_the_lease_is_in_doubt(
    runs: Runs, lines: Path, called: Any, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a call starts past the lease's deadline, be it only that its commit took so long, or never goes on after
    the renewal."""
    graph = asking(asks((called.name, "a")), ToolNode([called]))
    await runs.begin(input={"path": str(lines)})
    waiting: list[str] = []
    certain, write = runs.lease.certain, ToolLedger._write

    async def noted() -> None:
        waiting.append(called.name)
        await certain()

    async def slowly(ledger: ToolLedger, link: Any, call: Any, status: str, **outcome: Any) -> None:
        await write(ledger, link, call, status, **outcome)
        if status == "started":
            runs.lease.deadline = time.monotonic()

    monkeypatch.setattr(runs.lease, "certain", noted)
    if slow:
        monkeypatch.setattr(ToolLedger, "_write", slowly)
    else:
        runs.lease.deadline = time.monotonic()
    task = asyncio.create_task(runs.attempt(graph))
    try:
        await eventually(lambda: waiting, what="the call waits for the lease")
        assert await runs.rows() == ([(called.name, "started")] if slow else [])
        assert lines.read_text() == ""
    finally:
        runs.lease.deadline = time.monotonic() + 3600
        await task
    assert lines.read_text() == "a\n"


@pytest.mark.parametrize("called", [later, now])
async def test_a_superseded_executor_starts_no_tool(runs: Runs, lines: Path, called: Any) -> None:
    """Red when `started` is written without the fence, or the tool does not wait for it."""

    async def ask(state: Any) -> Any:
        await runs.connection.execute(
            "update runs set attempt = attempt + 1 where run_id = %s", (runs.run_id,)
        )
        return {"results": [await called.ainvoke({"path": state["path"], "line": "a"})]}

    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Superseded):
        await runs.attempt(one_node(ask))
    assert lines.read_text() == ""
    assert await runs.rows() == []


async def test_a_superseded_executor_records_no_result(runs: Runs, lines: Path) -> None:
    """Red when a result is written without the fence: the successor may have orphaned the call."""

    @tool
    async def loses(path: str, line: str) -> str:
        """Be superseded in the middle."""
        await runs.connection.execute(
            "update runs set attempt = attempt + 1 where run_id = %s", (runs.run_id,)
        )
        return note(path, line)

    async def node(state: Any) -> Any:
        return {"results": [await loses.ainvoke({"path": state["path"], "line": "a"})]}

    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Superseded):
        await runs.attempt(one_node(node))
    assert await runs.rows() == [("loses", "started")]


async def test_a_superseded_executor_forgets_no_call(runs: Runs, lines: Path) -> None:
    """Red when a call that a person is asked in is forgotten without the fence: the successor may have begun it anew."""

    @tool
    async def loses(path: str, line: str) -> str:
        """Be superseded, then ask."""
        await runs.connection.execute(
            "update runs set attempt = attempt + 1 where run_id = %s", (runs.run_id,)
        )
        return str(interrupt(line))

    async def node(state: Any) -> Any:
        return {"results": [await loses.ainvoke({"path": state["path"], "line": "a"})]}

    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Superseded):
        await runs.attempt(one_node(node))
    assert await runs.rows() == [("loses", "started")]


async def test_arguments_that_the_tool_refuses_start_nothing(runs: Runs, lines: Path) -> None:
    """Red when a call that never reached the tool's body is in the ledger."""
    graph = asking(asks(("later", ["no", "text"])), ToolNode([later]))  # type: ignore[arg-type]
    await runs.begin(input={"path": str(lines)})
    values = await runs.attempt(graph)
    assert values["messages"][-1].status == "error"
    assert "Input should be a valid string" in values["messages"][-1].content
    assert await runs.rows() == []


@pytest.mark.parametrize("kind", ["large", "object"])
async def test_a_result_that_cannot_be_kept_is_not_made_again(
    runs: Runs, lines: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when such a call counts as unfinished, or the tool is called again for its result."""
    monkeypatch.setattr(tool_ledger, "MAX_RESULT_BYTES", 1000)

    @tool(response_format="content_and_artifact")
    async def rich(path: str, line: str) -> Any:
        """Give more than can be kept."""
        note(path, line)
        return ("x" * 2000, None) if kind == "large" else ("x", object())

    graph = asking(asks(("rich", "a")), ToolNode([rich]))
    await runs.begin(input={"path": str(lines)})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded")
    assert await runs.rows("status", "outcome") == [("finished", None)]
    values = await runs.attempt(graph)
    assert "has taken effect, but its result could not be kept" in values["messages"][-1].content
    assert lines.read_text() == "a\n"


async def test_ids_of_a_model_may_be_anything(runs: Runs, lines: Path) -> None:
    """Red when an id that PostgreSQL cannot hold ends the run."""

    graph = asking(asks(("later", "a"), message_id="m\0\ud800" + "x" * 5000), ToolNode([later]))
    await runs.begin(input={"path": str(lines)})
    await runs.attempt(graph)
    assert lines.read_text() == "a\n"
    ((message_id,),) = await runs.rows("message_id")
    assert message_id == "m\ufffd?" + "x" * 197


async def test_a_tool_knows_from_the_runtime_whom_it_works_for(runs: Runs, lines: Path) -> None:
    """Red when tenant or user come from anywhere else, or are known outside a call."""

    @tool
    def whoami(path: str, line: str) -> str:
        """Tell."""
        call = current_call()
        assert (call.run_id, call.name) == (runs.run_id, "whoami")
        return f"{call.tenant} {call.user_id} {call.attempt}"

    async def node(state: Any) -> Any:
        given = {"path": state["path"], "line": "a"}
        told = [await whoami.ainvoke(given), whoami.invoke(given)]
        with pytest.raises(RuntimeError, match="no tool call here"):
            current_call()
        return {"results": told}

    graph = asking(asks(("whoami", "a")), ToolNode([whoami]))
    await runs.begin(input={"path": str(lines)})
    values = await runs.attempt(graph)
    assert values["messages"][-1].content == "{} {} 1".format(*OWNER)
    await runs.begin(input={"path": str(lines)})
    values = await runs.attempt(one_node(node))
    assert values["results"] == ["{} {} 1".format(*OWNER)] * 2


def test_tools_outside_runs_are_as_they_were(lines: Path) -> None:
    """Red when a tool needs a run."""
    assert now.invoke({"path": str(lines), "line": "a"}) == "noted a"


def test_which_tools_may_be_repeated() -> None:
    """A command may do anything. Red when `execute` is repeated after a crash, or an extra does not count."""

    @tool(extras={"idempotent": True})
    def declared() -> None:
        """Do nothing."""

    assert is_idempotent(declared)
    assert not is_idempotent(now)
    assert {t.name for t in sandbox_tools if is_idempotent(t)} == {"read_file", "write_file", "list_files"}


class Picky(Exception):
    """Its constructor takes what is not in ``args``."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("k"), OSError(2, "gone"), Picky(code=3), UnicodeError()]
)
def test_an_error_is_made_again_as_what_it_was(error: Exception) -> None:
    """Red when type or text are lost."""
    made = rebuild(describe(error))
    assert type(made) is type(error)
    assert str(made) == str(error)


def test_an_error_of_an_unknown_type_is_still_an_error() -> None:
    made = rebuild({"module": "os", "name": "system", "args": ["echo no"]})
    assert isinstance(made, ReplayedError)
    assert str(made) == "system: echo no"
