"""What `sandfleet deploy-local` says while it builds; what it deploys is tested in ``tests/infra``."""

import asyncio
from pathlib import Path

import pytest

from sandfleet.localstack import local_deployment
from sandfleet.localstack.local_deployment import LocalDeployment
from tests.waiting import eventually


async def test_a_long_step_is_told_and_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is told when it begins, not when all are done, and what is no step is kept for an error. Red when the builder's
    output is read at its end."""
    monkeypatch.setattr(local_deployment, "_STILL_S", 0.05)
    said: list[str] = []
    stream = asyncio.StreamReader()
    following = asyncio.ensure_future(
        LocalDeployment(tmp_path, tmp_path / "langgraph.json", say=said.append)._follow(stream)
    )
    stream.feed_data(b"warning: old\nStep: packing wha")
    stream.feed_data(b"t the executor needs\n")
    await eventually(lambda: "  still packing what the executor needs" in said, what="it goes on")
    assert said[0] == "  packing what the executor needs"
    stream.feed_data(b"it failed")
    stream.feed_eof()
    assert await following == "warning: old\nit failed\n"
