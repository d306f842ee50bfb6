"""The Python client for code without an event loop."""

import asyncio
import uuid

import pytest

from sandfleet.fleet.sandbox_client import ApiError
from sandfleet.fleet.sandbox_client.blocking import SandboxApi
from tests.sandboxes.conftest import Fleet


def use(url: str, key: str) -> None:
    """All of the client that is not a mere twin."""
    with SandboxApi(url, key) as api, api.create(template="small", ttl_s=60) as sandbox:
        sandbox.write_file("in.txt", b"hello")
        pieces: list[bytes] = []
        result = sandbox.exec(["cat", "in.txt"], on_output=lambda _, piece: pieces.append(piece))
        assert (result.exit_code, result.stdout, b"".join(pieces)) == (0, b"hello", b"hello")
        assert list(sandbox.read_pieces("in.txt")) == [b"hello"]
        process = sandbox.start("echo one; read line; echo $line", stdin=True)
        process.write(b"two\n", close=True)
        assert (b"".join(process.output()), process.exit_code) == (b"one\ntwo\n", 0)
        with pytest.raises(ApiError, match="missing"):
            sandbox.read_file("missing")
        before = sandbox.expires_at
        sandbox.live(90)
        assert sandbox.expires_at > before
        assert api.get(sandbox.sandbox_id).template == "small"
        assert len(api.search()) == 1
        with sandbox.fork() as copy:
            assert copy.read_file("in.txt") == b"hello"
        again = uuid.uuid4().hex
        with api.create(idempotency_key=again) as one:
            assert api.create(idempotency_key=again).sandbox_id == one.sandbox_id
    with SandboxApi(url, key) as api:
        assert api.search() == []


async def test_it_does_what_the_asynchronous_one_does(fleet: Fleet) -> None:
    """In a thread without a loop. Red when a method does not wait, or ``with`` removes nothing."""
    await asyncio.to_thread(use, fleet.url, fleet.alice)
