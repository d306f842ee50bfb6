"""The body of a run's creation. What is known to the dialect and not honoured here is refused by name."""

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, Field, model_validator

from sandfleet.functions.api.fields import Body, JsonObject, Metadata, Text, refuse
from sandfleet.shared.errors import InvalidRequest

_LEAVE_OUT = "leave it out"
_REFUSED = {
    "webhook": "poll the run or join it instead",
    "feedback_keys": _LEAVE_OUT,
    "langsmith_tracer": _LEAVE_OUT,
    "strict_resume": _LEAVE_OUT,
    "schedule": "submit runs from a scheduler of your own",
    "end_time": _LEAVE_OUT,
    "timezone": _LEAVE_OUT,
    "on_run_completed": "use on_completion",
}
_YEAR_S = 366 * 24 * 3600

StreamMode = Literal[
    "values", "updates", "messages", "messages-tuple", "custom", "tasks", "checkpoints", "debug", "tools"
]
Nodes = Literal["*"] | list[str]
Pair = Annotated[list[Any], Field(min_length=2, max_length=2)]


def _no_internals(value: JsonObject) -> JsonObject:
    for key in value:
        if key.startswith("__"):
            raise ValueError("keys that begin with __ are LangGraph's own")
    return value


Configurable = Annotated[JsonObject, AfterValidator(_no_internals)]


class AssistantConfig(Body):
    """LangChain's RunnableConfig, as far as an assistant can say it for its runs."""

    tags: list[str] = Field(default_factory=list)
    recursion_limit: int = Field(25, ge=1, le=2**31 - 1)
    max_concurrency: int = Field(1, ge=1, le=10_000)
    run_name: str = ""
    configurable: Configurable = Field(default_factory=dict)


class ConfigBody(AssistantConfig):
    """The same for one run."""

    metadata: Metadata = Field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """The fields that the caller has set, without ``metadata``, which becomes the run's own."""
        return self.model_dump(exclude_unset=True, exclude={"metadata"})


class SendBody(Body):
    """Go to a node with an input of its own."""

    node: str
    input: Any = None


class CommandBody(Body):
    """How to go on: an answer to interrupts, an update of the state, nodes to go to."""

    resume: Any = None
    update: JsonObject | list[Pair] | None = None
    goto: str | SendBody | list[str | SendBody] | None = None

    def given(self) -> dict[str, Any] | None:
        """What the caller has set; falsy answers count. None when nothing is."""
        return self.model_dump(exclude_unset=True) or None


class CheckpointBody(Body):
    """Names a checkpoint of the thread, or of a subgraph by ``checkpoint_ns``."""

    thread_id: str = ""
    checkpoint_ns: Text = ""
    checkpoint_id: Text | None = None
    checkpoint_map: JsonObject = Field(default_factory=dict)

    def of_thread(self, thread: UUID, by_id: str = "") -> JsonObject | None:
        """The checkpoint that is named here or ``by_id`` alone; None when none is.

        Raises InvalidRequest when it is said to be another thread's, or the two differ.
        """
        if self.thread_id not in ("", str(thread)):
            raise InvalidRequest("checkpoint.thread_id: must be the thread of the request")
        if by_id and self.checkpoint_id not in (None, by_id):
            raise InvalidRequest("checkpoint_id: differs from checkpoint.checkpoint_id")
        checkpoint_id = by_id or self.checkpoint_id
        if not checkpoint_id:
            return None
        named = self.model_dump(exclude_unset=True, exclude={"thread_id"})
        return {**named, "checkpoint_id": checkpoint_id}


class RunBody(Body):
    """Everything a run is started with."""

    assistant_id: Text = Field(min_length=1, description="Id of an assistant, or the name of a graph.")
    input: Any = None
    command: CommandBody | None = None
    config: ConfigBody = Field(default_factory=ConfigBody)
    context: Configurable = Field(default_factory=dict)
    metadata: Metadata = Field(default_factory=dict)
    stream_mode: StreamMode | list[StreamMode] = "values"
    stream_subgraphs: bool = False
    stream_resumable: bool = False
    interrupt_before: Nodes = Field(default_factory=list)
    interrupt_after: Nodes = Field(default_factory=list)
    checkpoint: CheckpointBody = Field(default_factory=CheckpointBody)
    checkpoint_id: Text = ""
    multitask_strategy: Literal["reject", "enqueue", "interrupt", "rollback"] = "enqueue"
    on_disconnect: Literal["cancel", "continue"] = "continue"
    on_completion: Literal["delete", "keep"] = "delete"
    if_not_exists: Literal["create", "reject"] = "reject"
    after_seconds: float = Field(0.0, ge=0, le=_YEAR_S)
    durability: Literal["sync", "async", "exit"] = "async"
    checkpoint_during: bool = True

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return refuse(value, _REFUSED)

    def stream_modes(self) -> list[str]:
        """The modes as a list without repetition; none given means ``values``."""
        modes = [self.stream_mode] if isinstance(self.stream_mode, str) else self.stream_mode
        return list(dict.fromkeys(modes)) or ["values"]
