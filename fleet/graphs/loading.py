"""Importing what ``langgraph.json`` names: a graph, a graph builder, or a factory of one."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import StateGraph
from langgraph.pregel import Pregel

from sandfleet.fleet.graphs.project import Project, is_file, split_spec
from sandfleet.shared.errors import GraphLoadError


class Graph:
    """A graph of the project, ready to be run.

    A module-level graph, or a factory without parameters, is one object for the whole process. A factory that takes a
    config is called for each run: one that was shared could leak from one user to another.
    """

    def __init__(self, graph_id: str, target: Any) -> None:
        self.graph_id = graph_id
        self._factory: Callable[..., Any] | None = None
        self._shared: Pregel[Any, Any, Any, Any] | None = None
        if isinstance(target, Pregel | StateGraph):
            self._shared = _compiled(graph_id, target)
        elif callable(target):
            self._factory = target
        else:
            raise GraphLoadError(
                f"Graph {graph_id!r} is a {type(target).__name__}. Name a compiled graph, a StateGraph, or a function"
                " that returns one."
            )
        self._per_run = self._factory is not None and bool(inspect.signature(self._factory).parameters)

    @asynccontextmanager
    async def open(self, config: RunnableConfig) -> AsyncIterator[Pregel[Any, Any, Any, Any]]:
        """The compiled graph for one run."""
        if self._shared is not None:
            yield self._shared
            return
        assert self._factory is not None
        made = self._factory(config) if self._per_run else self._factory()
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, AbstractAsyncContextManager):
            async with made as inner:
                yield _compiled(self.graph_id, inner)
        elif isinstance(made, AbstractContextManager):
            with made as inner:
                yield _compiled(self.graph_id, inner)
        else:
            graph = _compiled(self.graph_id, made)
            if not self._per_run:
                self._shared = graph
            yield graph


def _compiled(graph_id: str, made: Any) -> Pregel[Any, Any, Any, Any]:
    if isinstance(made, StateGraph):
        made = made.compile()
    if not isinstance(made, Pregel):
        raise GraphLoadError(
            f"Graph {graph_id!r}: the factory returned a {type(made).__name__}, not a graph."
        )
    return made


def load_graphs(project: Project) -> dict[str, Graph]:
    """Import all graphs of a project; its folders go to the front of the import path.

    Raises GraphLoadError that names the graph and the reason.
    """
    for root in reversed(project.import_roots()):
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    return {
        graph_id: Graph(graph_id, _target(project, graph_id, spec))
        for graph_id, spec in project.graphs.items()
    }


def _target(project: Project, graph_id: str, spec: str) -> Any:
    where, name = split_spec(graph_id, spec)
    try:
        module = _module_of_file(project, where) if is_file(where) else importlib.import_module(where)
    except GraphLoadError:
        raise
    except Exception as error:
        raise GraphLoadError(
            f"Graph {graph_id!r}: importing {where!r} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise GraphLoadError(f"Graph {graph_id!r}: {where!r} has no {name!r}.") from error


def _module_of_file(project: Project, where: str) -> ModuleType:
    path = (project.root / where).resolve()
    if not path.is_file():
        raise GraphLoadError(f"There is no {path}, which langgraph.json names.")
    # By its dotted name first, so that relative imports and a second import by the user's own code find one module.
    for root in project.import_roots():
        if not path.is_relative_to(root):
            continue
        parts = path.relative_to(root).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            module = importlib.import_module(".".join(parts))
            if module.__file__ and Path(module.__file__).resolve() == path:
                return module
    # The name belongs to another module (a file called json.py, say): import it under a name of its own.
    name = f"_langgraph_project_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
