"""A run that lost its executor is replayed from its checkpoint: what becomes of the tool calls that it had made."""

from collections import Counter

import pytest

from tests.projects.basic.effects import graph
from tests.tools.conftest import Broken

TOOLS = ["append", "append_in_thread", "command"]


def steps(path, *calls):
    """Input for the graph: a list of (tool, line) per step."""
    return {
        "path": str(path),
        "calls": [[{"tool": tool, "line": line} for tool, line in step] for step in calls],
    }


@pytest.mark.parametrize("tool", TOOLS)
async def test_a_finished_call_is_answered_from_the_ledger(runs, lines, tool):
    """Red when the result is not looked up: the line would be there twice."""
    await runs.begin(input=steps(lines, [(tool, "a")]))
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded")
    values = await runs.attempt(graph)
    assert lines.read_text() == "a\n"
    assert values["messages"][-1].content == "appended a"
    assert await runs.rows() == [(tool, "finished")]
    if tool == "command":
        assert ["command", "a"] in values["results"]


@pytest.mark.parametrize("point", ["tool.started", "tool.effect_done"])
@pytest.mark.parametrize("tool", TOOLS)
async def test_a_call_that_was_broken_off_is_not_repeated(runs, lines, tool, point):
    """Red when a started call is made again, or its doubt is not told to the graph."""
    await runs.begin(input=steps(lines, [(tool, "a")]))
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at=point)
    done = lines.read_text()
    assert done == ("a\n" if point == "tool.effect_done" else "")
    values = await runs.attempt(graph)
    assert lines.read_text() == done
    ((status, content),) = values["results"]
    assert status == "error"
    assert "may or may not have taken effect" in content
    assert await runs.rows() == [(tool, "orphaned")]


async def test_a_call_that_had_not_started_is_made(runs, lines):
    """Red when a call is taken for started before its row is committed."""
    await runs.begin(input=steps(lines, [("append", "a")]))
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.before_ledger")
    await runs.attempt(graph)
    assert lines.read_text() == "a\n"
    assert await runs.rows() == [("append", "finished")]


@pytest.mark.parametrize("point", ["tool.started", "tool.effect_done"])
async def test_an_idempotent_tool_is_called_again_with_the_same_key(runs, lines, point):
    """Red when the declaration counts for nothing, or the key is made anew."""
    await runs.begin(input=steps(lines, [("append_again", "a")]))
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at=point)
    ((key,),) = await runs.rows("call_id")
    values = await runs.attempt(graph)
    assert set(lines.read_text().splitlines()) == {f"a {key}"}
    assert values["results"] == [["success", f"appended a {key}"]]
    assert await runs.rows("status", "attempt") == [("finished", 3)]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_repeated_ids_are_told_apart(runs, lines, tool, nth):
    """Two messages, three calls, all of them `call_1`. Red when a call would get another's result: when neither task nor
    message nor place tells them apart. Each of them has a test of its own in test_seams.py."""
    await runs.begin(input=steps(lines, [(tool, "a"), (tool, "b")], [(tool, "c")]))
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded", nth=nth)
    values = await runs.attempt(graph)
    counted = Counter(lines.read_text().splitlines())
    assert max(counted.values()) == 1
    answers = [r for r in values["results"] if r[0] == "success"]
    orphans = [r for r in values["results"] if r[0] == "error"]
    told = {content.removeprefix("appended ") for _, content in answers}
    assert set(counted) - told <= {"a", "b"}  # the other one of the step had started, and is in doubt
    assert len(told) + len(orphans) == 3
    assert "c" in told


async def test_calls_of_one_message_can_be_equal(runs, lines):
    """Red when equal calls of a message are one call."""
    await runs.begin(input=steps(lines, [("append", "a"), ("append", "a")]))
    await runs.attempt(graph)
    assert lines.read_text() == "a\na\n"
    assert len(await runs.rows()) == 2


async def test_a_failure_is_raised_again_as_what_it_was(runs, lines):
    """Red when a failed call is repeated, or fails as something that `ToolNode` was not told to handle."""
    await runs.begin(input=steps(lines, [("fail", "a")]))
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded")
    values = await runs.attempt(graph)
    assert lines.read_text() == "a\n"
    assert values["results"][0][0] == "error"
    assert "no more after a" in values["results"][0][1]
    assert await runs.rows("status", "error") == [("failed", "ValueError: no more after a")]


async def test_a_tool_that_asks_a_person_begins_anew_when_it_is_answered(runs, lines):
    """Red when an interrupt counts as a failure or leaves a started call behind."""
    await runs.begin(input=steps(lines, [("append_if_approved", "a")]))
    values = await runs.attempt(graph)
    assert values["__interrupt__"][0].value == {"append": "a"}
    assert await runs.rows() == []
    await runs.begin(input=None, command={"resume": True})
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded")
    await runs.attempt(graph)
    assert lines.read_text() == "a\n"
    assert await runs.rows() == [("append_if_approved", "finished")]


async def test_a_run_without_checkpoints_makes_no_call_of_a_lost_attempt_again(runs, lines):
    """Durability `exit`: the graph begins anew. Red when what the lost attempt had called is called again."""
    await runs.begin(input=steps(lines, [("append", "a")]), durability="exit")
    with pytest.raises(Broken):
        await runs.attempt(graph, breaks_at="tool.recorded")
    values = await runs.attempt(graph)
    assert lines.read_text() == "a\n"
    assert values["results"][0][0] == "error"
    assert "may or may not have taken effect" in values["results"][0][1]
