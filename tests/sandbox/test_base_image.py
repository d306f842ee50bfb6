"""The base image is made when it is missing or old, and only then."""

import asyncio
from contextlib import suppress

import pytest

from sandfleet.fleet.host import base_image
from sandfleet.fleet.host.base_image import VERSION_LABEL, ensure_image, version
from sandfleet.fleet.host.engine import Engine, EngineError, EngineUnreachable

TAG = "sandfleet-test-image:of-a-test"


@pytest.fixture
async def tag(engine):
    yield TAG
    async with Engine(engine) as docker:
        with suppress(EngineError):  # a test that built nothing
            await docker.call("DELETE", f"/images/{TAG}", params={"force": "true"})


async def status_of(engine, tag, *command):
    async with Engine(engine) as docker:
        body = {
            "Image": tag,
            "Cmd": command,
            "Labels": {"sandfleet": "1"},
            "HostConfig": {"NetworkMode": "none"},
        }
        container = (await docker.call("POST", "/containers/create", body=body))["Id"]
        try:
            await docker.call("POST", f"/containers/{container}/start")
            ended = await docker.call("POST", f"/containers/{container}/wait")
            return ended["StatusCode"]
        finally:
            await docker.remove_container(container)


async def test_it_is_built_once_and_again_when_the_recipe_changes(engine, tag, monkeypatch):
    """Red when the label is not compared: a changed recipe would go unnoticed, or every start would build."""
    said = []
    assert await ensure_image(engine, tag, on_progress=said.append)
    assert len(said) == 2
    assert not await ensure_image(engine, tag)
    assert await status_of(engine, tag, "python3", "-c", "import ssl, json, asyncio") == 0
    monkeypatch.setattr(base_image.rootfs, "recipe", lambda: b"another")
    assert await ensure_image(engine, tag)


async def test_it_can_stand_on_another_image(engine, tag):
    assert await ensure_image(engine, tag, base="sandfleet-sandbox:latest")
    assert not await ensure_image(engine, tag, base="sandfleet-sandbox:latest")
    async with Engine(engine) as docker:
        labels = (await docker.image(tag))["Config"]["Labels"]
    assert labels[VERSION_LABEL] == version("sandfleet-sandbox:latest") != version()
    assert await status_of(engine, tag, "bash", "-c", "ls / | grep -q usr") == 0


async def test_without_an_engine_it_says_what_to_do():
    with pytest.raises(EngineUnreachable, match="DOCKER_HOST"):
        await ensure_image("unix:///no/such/socket", TAG)


async def test_two_builds_at_once_end_well(engine, tag):
    await asyncio.gather(ensure_image(engine, tag), ensure_image(engine, tag))
    assert not await ensure_image(engine, tag)
