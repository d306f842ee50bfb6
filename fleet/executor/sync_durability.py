"""Durability `sync` for subgraphs that were compiled with ``checkpointer=False``.

LangGraph hands the run's durability on to them and then waits for a checkpoint that nobody writes (AttributeError:
`_put_checkpoint_fut`, LangGraph 1.2). Here they find that there is nothing to wait for.
"""

from collections.abc import Generator

from langgraph.pregel._loop import AsyncPregelLoop, SyncPregelLoop


class _Nothing:
    """A future that was done all along."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()

    def result(self) -> None:
        return None


def install() -> None:
    """May be repeated. A loop that writes checkpoints puts its own future in the place of this one."""
    for loop in (AsyncPregelLoop, SyncPregelLoop):
        if not hasattr(loop, "_put_checkpoint_fut"):
            loop._put_checkpoint_fut = _Nothing()  # type: ignore[assignment]
