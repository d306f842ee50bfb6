"""Run by the Python of an environment that has swe-rex: so many sandboxes of an image at once.

``swe_rex_client.py IMAGE NUMBER LABEL`` prints a JSON list of seconds, one of each: until the end of its first command.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from typing import Any

from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import Command

_STARTS_S = 600.0
_ANSWER_S = 30.0


class _OnLoopback(DockerDeployment):  # type: ignore[misc] # a package that the project's environment does not have
    """Its server listens on the machine's own loopback: not every machine lets its processes connect to a bridge."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self._runtime_timeout = _ANSWER_S  # in place of 0.15 s, in which a busy machine answers nothing

    def _get_swerex_start_cmd(self, token: str) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(self._config.port)]
        return ["swerex-remote", "--auth-token", token, *address]


def _ports(number: int) -> list[int]:
    """Free ones, each once: swe-rex itself would look for them one by one and find some twice."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in listening]
    for each in listening:
        each.close()
    return ports


async def _first_command(deployment: _OnLoopback) -> float:
    begun = time.monotonic()
    await deployment.start()
    await deployment.runtime.execute(Command(command=["true"]))
    return time.monotonic() - begun


async def _all(image: str, number: int, label: str) -> list[float]:
    arguments = ["--network", "host", "--label", label]
    made = [
        _OnLoopback(image=image, pull="never", port=port, docker_args=arguments, startup_timeout=_STARTS_S)
        for port in _ports(number)
    ]
    spent = await asyncio.gather(*(_first_command(each) for each in made))
    names = [each.container_name for each in made]
    await asyncio.to_thread(subprocess.run, ["docker", "rm", "-f", *names], capture_output=True, check=True)
    return spent


if __name__ == "__main__":
    logging.disable()
    print(json.dumps(asyncio.run(_all(sys.argv[1], int(sys.argv[2]), sys.argv[3]))), flush=True)  # noqa: T201
    os._exit(0)  # else each deployment would look for its container once more
