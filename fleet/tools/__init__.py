"""For authors of tools: say that a tool may be repeated, and ask in its body who calls and under which key.

Nothing of this comes from the model. See ``docs/tools.md``.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from langchain_core.tools import BaseTool, ToolException

__all__ = [
    "CallOrphaned",
    "ToolCall",
    "current_call",
    "does_need_sandbox",
    "idempotent",
    "is_idempotent",
    "needs_sandbox",
    "running_call",
]

_NAME = "idempotent"
_SANDBOX = "needs_sandbox"

Tool = TypeVar("Tool", bound=BaseTool)


class CallOrphaned(ToolException):
    """A call was broken off by the loss of its executor; it may or may not have taken effect, and is not repeated.

    Raised by a tool that a node calls with plain arguments. A call with a tool call id gets a ``ToolMessage`` with
    status ``error`` instead.
    """


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The call that a tool's body works on."""

    tenant: str
    user_id: str
    run_id: UUID
    attempt: int
    """Of the run: above 1 after its executor was lost or has handed it over."""
    name: str
    idempotency_key: str
    """The same each time this call is made, by whichever attempt: pass it on to services that know such keys."""


running_call: ContextVar[ToolCall] = ContextVar("sandfleet_tool_call")
"""Set by the executor while a tool's body runs."""


def current_call() -> ToolCall:
    """The call that the current code works on. Raises RuntimeError outside a tool that an executor runs."""
    call = running_call.get(None)
    if call is None:
        raise RuntimeError(
            "There is no tool call here: ask in the body of a tool that a sandfleet executor runs."
        )
    return call


def idempotent(tool: Tool) -> Tool:
    """Declare that repeating a call of ``tool`` does no harm, so that a call which a crash broke off is made again.

    Sets ``tool.metadata["idempotent"]`` and returns the tool. ``@tool(extras={"idempotent": True})`` says the same.
    """
    tool.metadata = {**(tool.metadata or {}), _NAME: True}
    return tool


def is_idempotent(tool: BaseTool) -> bool:
    """Whether the tool was declared idempotent, in its metadata or its extras."""
    return bool((tool.metadata or {}).get(_NAME) or (tool.extras or {}).get(_NAME))


def needs_sandbox(tool: Tool) -> Tool:
    """Declare that ``tool`` uses the run's sandbox, so that a call begins only when there is one.

    While no host has room the run then waits, without a slot; a tool that does not say so sees the error ``no_room``.
    Sets ``tool.metadata["needs_sandbox"]`` and returns the tool. ``@tool(extras={"needs_sandbox": True})`` says the same.
    """
    tool.metadata = {**(tool.metadata or {}), _SANDBOX: True}
    return tool


def does_need_sandbox(tool: BaseTool) -> bool:
    """Whether the tool was declared to use the run's sandbox."""
    return bool((tool.metadata or {}).get(_SANDBOX) or (tool.extras or {}).get(_SANDBOX))
