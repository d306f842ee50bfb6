"""A provider for the example graphs, and a way to load one module of a graph project."""

import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType

import openai
import pytest

from sandfleet.loadtest.provider.server import Provider

_ROOT = Path(__file__).parents[2]
_PROJECTS = (_ROOT / "examples", _ROOT / "tests" / "projects")


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    """A running provider that the examples use."""
    provider = Provider()
    server = await provider.serve("127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.delenv("SANDFLEET_MODEL", raising=False)
    monkeypatch.setenv("SANDFLEET_PROVIDER_URL", f"http://127.0.0.1:{port}/v1")
    clients: list[openai.DefaultAioHttpClient] = []  # an executor keeps them for as long as it lives
    original = openai.DefaultAioHttpClient

    def open_client() -> openai.DefaultAioHttpClient:
        clients.append(original())
        return clients[-1]

    monkeypatch.setattr(openai, "DefaultAioHttpClient", open_client)
    yield provider
    for client in clients:
        await client.aclose()
    server.close()
    for connection in list(provider.connections):
        connection.close()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Import a module of a project folder anew, as an executor does with the folder on its path."""

    def load(project: str, module: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(_ROOT / project))
        return importlib.import_module(module)

    yield load
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and any(Path(file).is_relative_to(project) for project in _PROJECTS):
            del sys.modules[name]
