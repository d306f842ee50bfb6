"""LocalStack as a child process, from an environment of its own (`make install-localstack`): the last that wants no account.

Tests take it for MiniStack with ``--emulator=localstack``, see ``fixtures_emulators.py``.
"""

import asyncio
import json
import signal
import urllib.request
from pathlib import Path

from sandfleet.localstack.process import LocalStackError, Process
from sandfleet.localstack.supervisor import Supervisor

_PYTHON = Path(__file__).parent.parent / ".tools" / "localstack" / "bin" / "python"
_SERVICES = ("sqs", "s3", "cloudwatch", "sns")
"""What tests marked `emulators` may use. Of the others LocalStack has some only with Docker or an account."""


async def start_localstack(supervisor: Supervisor) -> str:
    """Start LocalStack on a free port of 127.0.0.1 and return its endpoint URL. It keeps everything in memory.

    Raises `LocalStackError` if it is not installed.
    """
    if not _PYTHON.exists():
        raise LocalStackError("LocalStack is not installed: run `make install-localstack`.")
    folder = supervisor.root / "localstack"
    folder.mkdir(exist_ok=True)

    def server(port: int) -> Process:
        return Process(
            name="localstack",
            argv=[str(_PYTHON), "-m", "localstack.runtime.main"],
            env={
                **supervisor.base_env(),
                "HOME": str(folder),
                "TMPDIR": str(folder),
                "DOCKER_HOST": f"unix://{folder}/no-engine.sock",
                "OVERRIDE_IN_DOCKER": "0",
                "GATEWAY_LISTEN": f"127.0.0.1:{port}",
                "LOCALSTACK_HOST": f"127.0.0.1:{port}",
                "SQS_ENDPOINT_STRATEGY": "path",
                "SERVICES": ",".join(_SERVICES),
                "EAGER_SERVICE_LOADING": "1",
                "DNS_ADDRESS": "0",
                "DISABLE_EVENTS": "1",
                "SKIP_SSL_CERT_DOWNLOAD": "1",
            },
            cwd=folder,
            log=supervisor.logs / "localstack.log",
            ready=lambda: asyncio.to_thread(_serves, port),
            stop_signal=signal.SIGKILL,  # it has nothing to save
            start_timeout_s=180.0,  # it compiles hundreds of modules at its first start
        )

    return f"http://127.0.0.1:{await supervisor.start_on_port(server)}"


def _serves(port: int) -> bool:
    """Whether all services have been loaded: the first call would wait for that, for longer than calls may take."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_localstack/health", timeout=10) as answer:
            states = json.load(answer)["services"]
    except OSError:
        return False
    return all(states[name] == "running" for name in _SERVICES)
