"""The API as a process of its own: ``python -m sandfleet.functions.api``."""

import logging
import signal
import socket
import threading
from types import FrameType

import uvicorn

from sandfleet.functions.api.app import create_app
from sandfleet.functions.api.gateway_metrics import RequestMetrics, watch_queues
from sandfleet.functions.api.resources import Resources
from sandfleet.shared import garbage, logs, metrics_server, tracing
from sandfleet.shared.db import logins
from sandfleet.shared.settings import settings

_FLUSH_S = 2.0
_DRAIN_S = 10  # for requests that are about to be answered; streams close at once


class _Server(uvicorn.Server):
    """Lets streams go when the process is told to stop, so that their clients come back to another one."""

    def __init__(self, config: uvicorn.Config, resources: Resources) -> None:
        super().__init__(config)
        self._resources = resources

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._resources.settings.metrics_listen:
            self._resources.spawn(watch_queues(self._resources.pool))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own handler: it raises the signal again after a clean stop, and the exit code would not be 0.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._resources.closing.set()


class _CutsAreMeant(logging.Filter):
    """A waiting response that breaks off is no error: it sends its client to ``Location``."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.getMessage() != "ASGI callable returned without completing response."


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    configured = settings()
    logs.configure("api", configured.log_level)
    logins.keep_fresh(configured)
    tracing.start("sandfleet-api", configured)
    app = create_app(configured)
    if configured.metrics_listen:
        app.add_middleware(RequestMetrics)
        metrics_server.serve(configured.metrics_listen)
    config = uvicorn.Config(
        app,
        host=configured.api_host,
        port=configured.api_port,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=75,  # above the usual 60 s of load balancers, which must be the first to close
    )
    garbage.settle()
    logging.getLogger("uvicorn.error").addFilter(_CutsAreMeant())
    _Server(config, app.state.resources).run()
    flushing = threading.Thread(target=tracing.stop, args=(_FLUSH_S,), daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)


if __name__ == "__main__":
    main()
