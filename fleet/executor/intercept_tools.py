"""Where tool calls enter the ledger: around `BaseTool.run` and `arun`, which every call of a LangChain tool passes.

A synchronous tool that is awaited enters before it goes to its thread, so that the ledger is written on the graphs' loop.

So it needs nothing of a graph's author: `ToolNode`, agents, middleware that calls a tool several times and a node's own
``tool.ainvoke`` all end there, the synchronous ones in threads. Callback handlers can hold a call back but not answer it,
and ``wrap_tool_call`` sees only what goes through one `ToolNode`. What `ToolNode` adds is the AI message that asks for a
call; it is noted around its two methods that run one call.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

from langchain_core.messages import AIMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langchain_core.tools.base import _prep_run_args
from langgraph.prebuilt import ToolNode

from sandfleet.fleet.executor import metrics
from sandfleet.fleet.executor.ledger_links import Link
from sandfleet.fleet.executor.tool_ledger import Asked, Call, Recorded, ToolLedger
from sandfleet.fleet.sandbox.run_sandbox import current_sandbox
from sandfleet.fleet.tools import ToolCall, does_need_sandbox, is_idempotent, running_call
from sandfleet.shared import tracing

_MAX_NAME = 200

LEDGER_KEY = "__sandfleet_tool_ledger"
"""The run's ledger in ``config["configurable"]``, for tools that are called with the config in a thread of their own."""

current_ledger: ContextVar[ToolLedger | None] = ContextVar("sandfleet_tool_ledger", default=None)
"""The ledger of the run that the current task works for; set by the executor."""

_asked: ContextVar[Asked | None] = ContextVar("sandfleet_asked_tool_call", default=None)

_entered_already: ContextVar[BaseTool | None] = ContextVar("sandfleet_entered_tool", default=None)
"""The tool whose call entered the ledger on its way to `run`."""

_run, _arun = BaseTool.run, BaseTool.arun
_ainvoke_structured, _ainvoke_simple = StructuredTool.ainvoke, Tool.ainvoke
_run_one, _arun_one = ToolNode._run_one, ToolNode._arun_one


def install() -> None:
    """From now on tool calls of runs go through their ledgers; other calls are as they were. May be repeated."""
    BaseTool.run = _recorded_run  # type: ignore[method-assign]
    BaseTool.arun = _recorded_arun  # type: ignore[method-assign]
    StructuredTool.ainvoke = _recorded_ainvoke(_ainvoke_structured)  # type: ignore[method-assign]
    Tool.ainvoke = _recorded_ainvoke(_ainvoke_simple)  # type: ignore[method-assign]
    ToolNode._run_one = _noted_run_one  # type: ignore[method-assign]
    ToolNode._arun_one = _noted_arun_one  # type: ignore[method-assign]


class _Answer(BaseTool):
    """Stands in for a tool whose call is answered without being made, so that its callbacks happen all the same."""

    description: str = ""
    recorded: Recorded

    @classmethod
    def of(cls, tool: BaseTool, recorded: Recorded, **handling: Any) -> Self:
        return cls(
            name=tool.name,
            description=tool.description,
            callbacks=tool.callbacks,
            tags=tool.tags,
            metadata=tool.metadata,
            verbose=tool.verbose,
            recorded=recorded,
            **handling,
        )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.recorded.error is not None:
            raise self.recorded.error
        return self.recorded.value

    async def _arun(self, *args: Any, **kwargs: Any) -> Any:
        return self._run()


class _Entered:
    """A tool call on its way into the ledger."""

    def __init__(
        self, tool: BaseTool, tool_input: Any, ledger: ToolLedger, call: Call, refused: Exception | None
    ) -> None:
        self.tool = tool
        self.tool_input = tool_input
        self.ledger = ledger
        self.call = call
        self.refused = refused

    @property
    def shown(self) -> Any:
        return _shown(self.tool, self.tool_input)

    def refusal(self) -> BaseTool:
        """Arguments that the tool refuses start nothing."""
        return _Answer.of(
            self.tool,
            Recorded(error=self.refused),
            handle_validation_error=self.tool.handle_validation_error,
            handle_tool_error=self.tool.handle_tool_error,
        )

    def answer(self, recorded: Recorded) -> BaseTool:
        return _Answer.of(self.tool, recorded)

    async def begin(self, link: Link) -> Recorded | None:
        return await self.ledger.begin(link, self.call)

    async def returned(self, value: Any, link: Link) -> None:
        await self.ledger.returned(link, self.call, value)

    async def raised(self, error: BaseException, link: Link) -> None:
        await self.ledger.raised(link, self.call, error)

    def _span(self) -> AbstractContextManager[tracing.Span]:
        name = self.call.name[:_MAX_NAME]
        return tracing.span(
            f"execute_tool {name}",
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "sandfleet.call_id": str(self.call.call_id),
            },
        )

    @contextmanager
    def body(self) -> Iterator[None]:
        """While the tool runs: it may ask who calls, and what it calls in turn was not asked for by the message."""
        key = self.ledger.fence.key
        call = ToolCall(
            *key, self.ledger.fence.attempt, self.call.name, idempotency_key=str(self.call.call_id)
        )
        asked, running = _asked.set(None), running_call.set(call)
        self.ledger.bodies.add(self.call)
        try:
            with metrics.tool_call(), self._span():
                yield
        finally:
            self.ledger.bodies.discard(self.call)
            _asked.reset(asked)
            running_call.reset(running)


def _entered(tool: BaseTool, tool_input: Any, kwargs: dict[str, Any]) -> _Entered | None:
    """The call as the ledger knows it; None outside runs."""
    if isinstance(tool, _Answer):
        return None
    if _entered_already.get() is tool:
        _entered_already.set(None)
        return None
    configurable = (kwargs.get("config") or {}).get("configurable") or {}
    ledger: ToolLedger | None = configurable.get(LEDGER_KEY) or current_ledger.get()
    if ledger is None:
        return None
    if LEDGER_KEY not in configurable:
        configurable = (var_child_runnable_config.get() or {}).get("configurable") or {}
    runtime = configurable.get("__pregel_runtime")
    execution = getattr(runtime, "execution_info", None)
    refused: Exception | None = None
    tool_call_id: str | None = kwargs.get("tool_call_id")
    try:
        tool._to_args_and_kwargs(
            dict(tool_input) if isinstance(tool_input, dict) else tool_input, tool_call_id
        )
    except Exception as error:
        refused = error
    asked = _asked.get()
    if asked is not None and asked.tool_call_id != tool_call_id:
        asked = None
    call = ledger.call(
        ns=configurable.get("checkpoint_ns") or "",
        node_attempt=getattr(execution, "node_attempt", 1),
        name=tool.name,
        tool_call_id=tool_call_id,
        asked=asked,
        arguments=None if asked is not None else _shown(tool, tool_input),
        idempotent=is_idempotent(tool),
    )
    return _Entered(tool, tool_input, ledger, call, refused)


def _shown(tool: BaseTool, tool_input: Any) -> Any:
    """The arguments as the caller gave them, without what the runtime injected."""
    return tool._filter_injected_args(tool_input) if isinstance(tool_input, dict) else tool_input


def _recorded_run(self: BaseTool, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
    entered = _entered(self, tool_input, kwargs)
    if entered is None:
        return _run(self, tool_input, *args, **kwargs)
    if entered.refused is not None:
        return _run(entered.refusal(), entered.shown, *args, **kwargs)
    links = entered.ledger.links
    recorded = links.use_blocking(entered.begin)
    if recorded is not None:
        return _run(entered.answer(recorded), entered.shown, *args, **kwargs)
    with entered.body():
        try:
            value = _run(self, tool_input, *args, **kwargs)
        except BaseException as error:
            links.use_blocking(partial(entered.raised, error))
            raise
    links.use_blocking(partial(entered.returned, value))
    return value


async def _recorded_arun(self: BaseTool, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
    entered = _entered(self, tool_input, kwargs)
    if entered is None:
        return await _arun(self, tool_input, *args, **kwargs)
    answer = await _answered(entered)
    if answer is not None:
        return await _arun(answer, entered.shown, *args, **kwargs)
    return await _made(entered, partial(_arun, self, tool_input, *args, **kwargs))


def _recorded_ainvoke(ainvoke: Any) -> Any:
    async def recorded_ainvoke(self: Any, input: Any, config: Any = None, **kwargs: Any) -> Any:
        ledger = current_ledger.get()
        if self.coroutine is not None or ledger is None or not ledger.links.on_loop():
            return await ainvoke(self, input, config, **kwargs)
        tool_input, run_kwargs = _prep_run_args(input, config, **kwargs)
        entered = _entered(self, tool_input, run_kwargs)
        if entered is None:
            return await ainvoke(self, input, config, **kwargs)
        answer = await _answered(entered)
        if answer is not None:
            return await _arun(answer, entered.shown, **run_kwargs)
        token = _entered_already.set(self)
        try:
            return await _made(entered, partial(ainvoke, self, input, config, **kwargs))
        finally:
            _entered_already.reset(token)

    return recorded_ainvoke


async def _answered(entered: _Entered) -> BaseTool | None:
    """Begin the call; what answers it if it must not be made."""
    if entered.refused is not None:
        return entered.refusal()
    sandbox = current_sandbox.get(None)
    if sandbox is not None and does_need_sandbox(entered.tool) and entered.ledger.links.on_loop():
        await sandbox.ready()
    recorded = await entered.ledger.links.use(entered.begin)
    return None if recorded is None else entered.answer(recorded)


async def _made(entered: _Entered, make: Callable[[], Awaitable[Any]]) -> Any:
    """Make the call that has begun, and record how it ended."""
    links = entered.ledger.links
    with entered.body():
        try:
            value = await make()
        except BaseException as error:
            await links.use(partial(entered.raised, error))
            raise
    await links.use(partial(entered.returned, value))
    return value


def _noted_run_one(self: ToolNode, call: Any, input_type: Any, tool_runtime: Any) -> Any:
    with _noted(self, call, tool_runtime):
        return _run_one(self, call, input_type, tool_runtime)


async def _noted_arun_one(self: ToolNode, call: Any, input_type: Any, tool_runtime: Any) -> Any:
    with _noted(self, call, tool_runtime):
        return await _arun_one(self, call, input_type, tool_runtime)


@contextmanager
def _noted(node: ToolNode, call: Any, tool_runtime: Any) -> Iterator[None]:
    if current_ledger.get() is None:
        yield
        return
    token = _asked.set(_find_asked(tool_runtime.state, node._messages_key, call))
    try:
        yield
    finally:
        _asked.reset(token)


def _find_asked(state: Any, messages_key: str, call: Any) -> Asked | None:
    """The newest AI message of the state asks for the call, unless the graph made it up."""
    if isinstance(state, list):
        messages = state
    elif isinstance(state, dict):
        messages = state.get(messages_key) or []
    else:
        messages = getattr(state, messages_key, None) or []
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if isinstance(message, AIMessage):
            calls = message.tool_calls
            place = next((i for i, each in enumerate(calls) if each is call), None)
            if place is None:  # handed over by a Send, and so copied
                place = next((i for i, each in enumerate(calls) if each == call), None)
            if place is None:
                return None
            return Asked(message.id or f"#{position}", place, call.get("id"))
    return None
