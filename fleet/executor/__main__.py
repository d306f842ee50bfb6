"""``python -m sandfleet.fleet.executor``: an executor process. SIGTERM or SIGINT drains it; it exits 0 after that.

With ``--suspects`` it is the process that an executor starts for runs that may kill it.
"""

import asyncio
import os
import signal
import sys

import orjson
import uvloop
from psycopg.types.json import set_json_loads

from sandfleet.fleet.executor.control import Executor
from sandfleet.fleet.executor.quarantine import FLAG, when_parent_ends
from sandfleet.fleet.graphs.loading import load_graphs
from sandfleet.fleet.graphs.project import apply_environment, read_project
from sandfleet.shared import garbage, logs, metrics_server, tracing
from sandfleet.shared.db import logins
from sandfleet.shared.errors import GraphLoadError, SandfleetError
from sandfleet.shared.settings import settings
from sandfleet.shared.templates import read_templates

_SWITCH_INTERVAL_S = 0.001
"""How long the graphs' thread may keep the interpreter from the control loop; Python's default is 5 ms."""


async def _serve() -> None:
    configured = settings()
    if configured.project is None:
        raise GraphLoadError("Set SANDFLEET_PROJECT to the path of a langgraph.json.")
    logins.keep_fresh(configured)
    project = read_project(configured.project)
    apply_environment(project)
    templates = read_templates(configured)
    templates.check_graphs(project.graphs)
    project = project.only(configured.graphs)
    suspects = sys.argv[2] if sys.argv[1:2] == [FLAG] else None
    executor = Executor(configured, load_graphs(project), templates, suspects=suspects)
    tracing.start("sandfleet-executor", configured, **{"sandfleet.pool": configured.pool})
    if not suspects:  # the address is its parent's
        metrics_server.serve(configured.metrics_listen)
    garbage.settle()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, executor.drain)
    if suspects:
        when_parent_ends(executor.leave)
    await executor.run()


def _leave(_number: int, _frame: object) -> None:
    """A signal while the graphs are loaded: nothing was claimed yet, and nothing has to be closed."""
    os._exit(0)


def main() -> None:
    """Run the executor."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    logs.configure("executor", settings().log_level)
    set_json_loads(orjson.loads)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        uvloop.run(_serve())
    except SandfleetError as error:
        sys.exit(f"{error.code}: {error.message}")
    # A graph may have left threads that never end (a blocking node): everything of ours is closed by now.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
