"""The scripted model provider of the load tool, as a child process: graphs of the examples and of tests call it."""

import sys

from sandfleet.localstack.process import Process, tcp_answers
from sandfleet.localstack.supervisor import Supervisor


async def start_provider(supervisor: Supervisor) -> int:
    """Start it on a free port of 127.0.0.1, and return the port."""

    def provider(port: int) -> Process:
        return Process(
            name="provider",
            argv=[sys.executable, "-P", "-m", "sandfleet.loadtest.provider", "--port", str(port)],
            env=supervisor.base_env(),
            cwd=supervisor.root,
            log=supervisor.logs / "provider.log",
            ready=lambda: tcp_answers(port),
        )

    return await supervisor.start_on_port(provider)
