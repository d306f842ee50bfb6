"""The embedded AWS emulator: MiniStack, with SQS and S3 unless more is asked for, run as a plain child process."""

import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from sandfleet.localstack.docker_api import emulator_name
from sandfleet.localstack.process import Process, tcp_answers
from sandfleet.localstack.supervisor import Supervisor
from sandfleet.localstack.task_network import TaskNetwork


@dataclass(frozen=True)
class Tasks:
    """Where containers of ECS' tasks are: an engine and a network of it."""

    docker_host: str
    network: TaskNetwork


async def start_ministack(
    supervisor: Supervisor,
    region: str,
    restore: Callable[[str], Awaitable[None]],
    services: str = "sqs,s3",
    tasks: Tasks | None = None,
) -> str:
    """Start the emulator on a free port of 127.0.0.1 and return its endpoint URL. ``services`` are MiniStack's names of
    them, with commas. With ``tasks`` the tasks of ECS are containers; the URLs that it tells, of queues for example, are of
    the network's address then, at which a forwarder has to serve.

    It keeps queues in memory, so ``restore`` is called with the URL at each start, to make what must be there. Objects of
    buckets are kept in the stack's folder.

    Without ``tasks`` it is kept away from any Docker Engine: it would look for containers of its own there.
    """
    folder = supervisor.root / "ministack"
    folder.mkdir(exist_ok=True)

    def url(port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def server(port: int) -> Process:
        return Process(
            name="ministack",
            argv=[sys.executable, "-m", "ministack"],
            env={
                **supervisor.base_env(),
                "GATEWAY_PORT": str(port),
                "BIND_HOST": "127.0.0.1",
                "MINISTACK_HOST": tasks.network.address if tasks else "127.0.0.1",
                "MINISTACK_REGION": region,
                "SERVICES": services,
                "IOT_MTLS_ENABLED": "0",
                "SFTP_ENABLED": "0",
                "STATE_DIR": str(folder),
                "S3_DATA_DIR": str(folder / "s3"),
                "S3_PERSIST": "1",
                "TMPDIR": str(folder),
                **_engine(tasks, supervisor.instance, folder),
            },
            cwd=folder,
            log=supervisor.logs / "ministack.log",
            ready=lambda: tcp_answers(port),
            restore=lambda: restore(url(port)),
            # It has nothing to save, and asked politely it waits three seconds for open long polls.
            stop_signal=signal.SIGKILL,
        )

    return url(await supervisor.start_on_port(server))


def _engine(tasks: Tasks | None, instance: str, folder: Path) -> dict[str, str]:
    if tasks is None:
        return {"DOCKER_HOST": f"unix://{folder}/no-engine.sock"}
    return {
        "DOCKER_HOST": tasks.docker_host,
        "HOSTNAME": tasks.network.name,  # tasks get the network of the container that is called so
        "MINISTACK_HOSTNAME": emulator_name(instance),  # in the label of containers
    }
