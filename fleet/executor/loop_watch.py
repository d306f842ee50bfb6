"""Watches the graphs' event loop from outside: how late it is, and which node holds it."""

import logging
import sys
import sysconfig
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)

STALLED_S = 1.0
"""A loop that is this late counts as blocked. Ordinary steps take milliseconds of it."""

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
_OWN = str(Path(__file__).parent.parent)


class Blocker(NamedTuple):
    """What runs on a loop: graph, node and run as LangGraph's config names them, and the innermost line of a user's."""

    graph: str | None
    node: str | None
    run_id: str | None
    place: str | None


class LoopWatch:
    """Pings an event loop that runs in another thread. For use by one thread; ``look`` is called several times a second."""

    def __init__(self, loop: AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._asked: float | None = None  # when the ping was sent that has no answer yet
        self._looked = time.monotonic()
        self._worst_s = 0.0
        self._reported = False

    def look(self) -> None:
        """Send a ping unless one is on its way; report a loop that has become blocked, once, and its end."""
        now = time.monotonic()
        if now - self._looked >= STALLED_S and self._asked is not None:
            self._asked = (
                now  # it was us who did not run: the process was stopped, or the machine is overloaded
            )
        self._looked = now
        late_s = self.late_s()
        self._worst_s = max(self._worst_s, late_s)
        if self._asked is None:
            self._asked = now
            self._loop.call_soon_threadsafe(self._answer)
        elif late_s >= STALLED_S and not self._reported:
            self._reported = True
            blocker = running_on(self._thread)
            _log.warning(
                "the node %r of the graph %r holds the event loop: runs beside it wait. Use async calls, or make the "
                "node a plain function.",
                blocker.node,
                blocker.graph,
                extra={**blocker._asdict(), "late_s": round(late_s, 3)},
            )

    def late_s(self) -> float:
        """How long the loop has not answered, in seconds."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def stalled(self) -> bool:
        """Whether something holds the loop."""
        return self.late_s() >= STALLED_S

    def take_worst_ms(self) -> int:
        """The longest wait since the last call of this, in milliseconds."""
        worst_s, self._worst_s = max(self._worst_s, self.late_s()), 0.0
        return round(worst_s * 1000)

    def _answer(self) -> None:
        """Called on the watched loop."""
        late_s = self.late_s()
        self._worst_s = max(self._worst_s, late_s)
        self._asked = None
        if self._reported:
            self._reported = False
            _log.warning("the event loop was held for %.1f s", late_s)


def running_on(thread: threading.Thread) -> Blocker:
    """What a thread runs at this moment, as far as its stack tells."""
    frame = sys._current_frames().get(thread.ident or 0)
    config: dict[str, Any] = next(_configs(frame), {})
    configurable, metadata = config.get("configurable") or {}, config.get("metadata") or {}
    run_id = configurable.get("run_id")
    return Blocker(
        configurable.get("graph_id"),
        metadata.get("langgraph_node"),
        None if run_id is None else str(run_id),
        _place(frame),
    )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _configs(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The configs that LangGraph's and LangChain's frames carry, innermost first."""
    for each in _frames(frame):
        if str(each.f_globals.get("__name__")).startswith(("langgraph.", "langchain_core.")):
            config = each.f_locals.get("config")
            if isinstance(config, dict) and "langgraph_node" in (config.get("metadata") or {}):
                yield config


def _place(frame: FrameType | None) -> str | None:
    for each in _frames(frame):
        path = each.f_code.co_filename
        if not path.startswith((*_LIBRARIES, _OWN)) and "site-packages" not in path:
            return f"{path}:{each.f_lineno} in {each.f_code.co_name}"
    return None
