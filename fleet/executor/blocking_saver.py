"""The synchronous half of a checkpointer, for nodes that are plain functions: each call is its async form on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from sandfleet.shared.errors import SandfleetError

T = TypeVar("T")


class BlockingSaver(BaseCheckpointSaver[int]):
    """Derived classes have the async forms, which run on ``loop``. The methods here work from any thread but that loop's own,
    which they would block for ever: they raise SandfleetError there."""

    def __init__(self, *, serde: SerializerProtocol, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(serde=serde)
        self._loop = loop

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """``aget_tuple`` from a worker thread."""
        return self._from_thread(self.aget_tuple(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """``alist`` from a worker thread."""
        return iter(self._from_thread(_gather(self.alist(config, filter=filter, before=before, limit=limit))))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """``aput`` from a worker thread."""
        return self._from_thread(self.aput(config, checkpoint, metadata, new_versions))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """``aput_writes`` from a worker thread."""
        self._from_thread(self.aput_writes(config, writes, task_id, task_path))

    def delete_thread(self, thread_id: str) -> None:
        """``adelete_thread`` from a worker thread."""
        self._from_thread(self.adelete_thread(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """``adelete_for_runs`` from a worker thread."""
        self._from_thread(self.adelete_for_runs(run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """``acopy_thread`` from a worker thread."""
        self._from_thread(self.acopy_thread(source_thread_id, target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """``aprune`` from a worker thread."""
        self._from_thread(self.aprune(thread_ids, strategy=strategy))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """``aget_delta_channel_history`` from a worker thread."""
        return self._from_thread(self.aget_delta_channel_history(config=config, channels=channels))

    def _from_thread(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if on_loop:
            work.close()
            raise SandfleetError(
                "A synchronous call of the checkpointer on the event loop would block it for ever. Use the async form, for"
                " example `await graph.aget_state(config)`, or make the node a plain function."
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _gather(found: AsyncIterator[CheckpointTuple]) -> Sequence[CheckpointTuple]:
    return [each async for each in found]
