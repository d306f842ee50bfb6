"""Starts the agent: ``main([SOCKET, UID, GID])``, the last two if it must drop its privileges itself."""

from __future__ import annotations

import contextlib
import os
import socket

from .agent import Agent
from .relay import Relay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


_STDERR = 2


def main(arguments: list[str]) -> NoReturn:
    """Connect, drop to the given user, serve until the host is gone."""
    os.umask(0o022)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own is gone by now
            os.set_inheritable(int(name), int(name) <= _STDERR)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(arguments[0])
    if len(arguments) > 1:
        os.setgroups([])
        os.setgid(int(arguments[2]))
        os.setuid(int(arguments[1]))
    agent = Agent(connection, arguments[0])
    Relay(agent, os.path.dirname(arguments[0]))
    agent.serve()
