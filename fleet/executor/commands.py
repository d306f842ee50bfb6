"""What is left to say of a run's command when an earlier attempt has begun to carry it out.

LangGraph stores a command's update, destination and plain answer at the checkpoint that they are for, and goes on from there
without being told again; it would do it all once more. Answers by id it keeps in memory only.
"""

import re
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from langgraph.types import Command, StateSnapshot

from sandfleet.fleet.executor.run_request import build_input
from sandfleet.fleet.executor.saver import FencedSaver
from sandfleet.shared.store.claims import ClaimedRun

_ID = re.compile("[0-9a-f]{32}")


async def input_of_attempt(
    run: ClaimedRun, saver: FencedSaver, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig
) -> Any:
    """What to start the graph with. Raises as LangGraph does when it reads a thread's state."""
    given = build_input(run)
    if run.fence.attempt == 1 or not isinstance(given, Command):
        return given
    stored = await saver.has_stored_command(str(run.thread_id))
    answers = None if stored else given.resume
    if isinstance(given.resume, dict) and all(_ID.fullmatch(key) for key in given.resume):
        # One that was taken must not be given again: it would pass for the answer to its task's next question.
        asked = _questions(await graph.aget_state(config, subgraphs=True))
        answers = {key: answer for key, answer in given.resume.items() if key in asked} or None
    if stored:
        return None if answers is None else Command(resume=answers)
    if answers is None and given.update is None and not given.goto:
        return None
    return Command(resume=answers, update=given.update, goto=given.goto)


def _questions(state: StateSnapshot) -> set[str]:
    """Ids of the interrupts that wait for an answer. A task with a subgraph has those that the subgraph had when the task
    was interrupted last; the subgraph's own are newer."""
    asked: set[str] = set()
    for task in state.tasks:
        nested = _questions(task.state) if isinstance(task.state, StateSnapshot) else set()
        asked |= nested or {interrupt.id for interrupt in task.interrupts}
    return asked
