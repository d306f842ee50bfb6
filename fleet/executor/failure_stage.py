"""Where a run failed, as its metrics and its trace name it."""

from typing import Literal

from sandfleet.shared.errors import SandboxError

Stage = Literal["prepare", "model", "tool", "sandbox", "graph", "timeout"]
"""Before its graph began, in a call of it, in its own code, or by its time limit."""


def of_graph_error(error: BaseException, *, model: BaseException | None, tool: BaseException | None) -> Stage:
    """The stage of what a graph has raised; ``model`` and ``tool`` are the last errors of such calls in the run."""
    seen: BaseException | None = error
    met: set[int] = set()
    while seen is not None and id(seen) not in met:  # causes may go round in a circle
        met.add(id(seen))
        if isinstance(seen, SandboxError):
            return "sandbox"
        if seen is model:
            return "model"
        if seen is tool:
            return "tool"
        seen = seen.__cause__
    return "graph"
