"""The sandbox host daemon: ``python -m sandfleet.fleet.host``. Ends with 0 on SIGTERM, after what runs has
ended or a grace is over, workspaces were kept and all sandboxes removed; a second SIGTERM ends the wait.

On SIGHUP it ends at once and leaves them to the next one, which adopts them; so it is after a crash.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from aiohttp import web

from sandfleet.fleet.host import metrics
from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.app import HostApi
from sandfleet.fleet.host.backend import Backend
from sandfleet.fleet.host.bwrap_backend import BwrapBackend
from sandfleet.fleet.host.capacity import Capacity
from sandfleet.fleet.host.clock import DatabaseClock
from sandfleet.fleet.host.docker_backend import DockerBackend
from sandfleet.fleet.host.drain import Drain
from sandfleet.fleet.host.heartbeat import Heartbeat, HostAbout, deployment_of
from sandfleet.fleet.host.labels import Owner, machine
from sandfleet.fleet.host.lifetimes import Lifetimes
from sandfleet.fleet.host.own_folder import STATE, own_folder
from sandfleet.fleet.host.reaper import Reaper
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.snapshots import Snapshots
from sandfleet.fleet.host.state import StateFolder
from sandfleet.fleet.host.warm import Refill
from sandfleet.shared import logs, metrics_server, tracing
from sandfleet.shared.db import logins
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.settings import Settings, settings
from sandfleet.shared.templates import Templates, read_templates

logger = logging.getLogger(__name__)

_FLUSH_S = 2.0  # for spans that a collector has not taken yet
_BACKLOG = 4096  # a connection to a unix socket beyond it fails at once, as if no host were there


def make_backend(config: Settings, templates: Templates, instance: str) -> Backend:
    """The backend that the settings name, not yet open."""
    if config.sandbox == "bwrap":
        return BwrapBackend(templates)
    return DockerBackend(config, templates, instance)


def _bind(path: Path) -> socket.socket:
    """A unix socket that only this user may connect to; its folder is made private if it is new."""
    if len(os.fsencode(path)) > 107:
        raise SandfleetError(
            f"SANDFLEET_HOST_SOCKET is longer than the 107 bytes that a unix socket may have: {path}"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    return listener


def _listen(config: Settings) -> tuple[socket.socket | None, str | None]:
    """The TCP socket for executors on other machines, if there is to be one, and the URL at which they reach it."""
    if not config.host_listen:
        return None, None
    name, _, port = config.host_listen.rpartition(":")
    name = name.strip("[]")
    try:
        listener = socket.create_server(
            (name, int(port)), family=socket.AF_INET6 if ":" in name else socket.AF_INET
        )
    except (OSError, ValueError, OverflowError) as error:
        raise SandfleetError(
            f"The sandbox host cannot listen at SANDFLEET_HOST_LISTEN={config.host_listen}: {error}"
        ) from error
    bound = listener.getsockname()
    shown = socket.gethostname() if bound[0] in ("0.0.0.0", "::") else bound[0]
    shown = f"[{shown}]" if ":" in shown else shown
    return listener, config.host_address or f"http://{shown}:{bound[1]}"


async def serve(config: Settings, instance: str) -> None:
    """Run the host until SIGTERM or SIGINT. Raises SandfleetError if it cannot start."""
    if not config.host_secret:
        raise SandfleetError(
            "SANDFLEET_HOST_SECRET is empty: set the same key for executors and sandbox hosts."
        )
    stop = asyncio.Event()
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, leave.set)
    async with own_folder(config.host_dir.absolute()) as folder:
        templates = read_templates(config)
        backend = make_backend(config, templates, instance)
        try:
            if deployment := await deployment_of(config.database_url):
                backend.belong_to(deployment)
            await backend.open()
            agent = AgentFiles(folder.parent / "agent")
            host_id = Owner.of_host(config, instance).host_id
            snapshots = Snapshots(config, folder.parent / "snapshots", host_id)
            registry = Registry(
                backend,
                folder,
                agent,
                templates,
                state=StateFolder(folder.parent / STATE),
                capacity=Capacity.of_host(config),
                snapshots=snapshots,
                refill=Refill(config.warm_refill_per_s, config.warm_age_s),
            )
            await _serve(config, instance, registry, backend, (stop, leave))
        finally:
            await backend.close()


async def _serve(
    config: Settings,
    instance: str,
    registry: Registry,
    backend: Backend,
    signals: tuple[asyncio.Event, asyncio.Event],
) -> None:
    stop, leave = signals
    clock = DatabaseClock()
    listener, remote = _listen(config)
    own = Owner.of_host(config, instance)
    host = HostAbout(
        own.host_id,
        instance,
        f"unix:{config.host_socket.absolute()}",
        remote,
        backend.name,
        machine(),
        own.folder,
    )
    metrics.DATABASE_AGE.set_function(lambda: clock.age_s() or 0.0)
    heartbeat = Heartbeat(config.database_url, registry, clock, about=host)
    about = {"host_id": host.host_id, "instance": instance, "backend": backend.name, "remote": remote}
    reaper = Reaper(
        config.database_url,
        backend,
        heartbeat,
        own,
        registry.owned,
        every_s=config.reap_every_s,
        grace_s=config.reap_grace_s,
    )
    runner = web.AppRunner(
        HostApi(config, registry, clock, about).application(),
        handler_cancellation=True,  # a caller that hangs up ends its command
        access_log=None,
        shutdown_timeout=1.0,
    )
    drain = Drain(registry, config.host_save_s)
    await registry.open()
    await runner.setup()
    loops = [
        asyncio.create_task(heartbeat.run(), name="heartbeat"),
        asyncio.create_task(registry.tend(), name="tend"),
        asyncio.create_task(Lifetimes(registry).run(), name="end what is over"),
        asyncio.create_task(registry.keep_warm(), name="keep warm"),
        asyncio.create_task(reaper.run(), name="reap"),
        asyncio.create_task(registry.snapshots.tend(), name="tend snapshots"),
    ]
    try:
        await web.SockSite(runner, _bind(config.host_socket), backlog=_BACKLOG).start()
        if listener is not None:
            await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        logger.info("sandbox host is ready", extra={**about, "room": registry.room()})
        stopped = [asyncio.create_task(event.wait()) for event in signals]
        await asyncio.wait([*stopped, *loops], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() and not leave.is_set():
            logger.info("sandbox host drains", extra={"sandboxes": len(registry)})
            await _drain(config, drain, signals)
        for waiting in stopped:
            waiting.cancel()
        for loop in loops:
            if loop.done():
                loop.result()  # only a fault of ours ends it
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        config.host_socket.unlink(missing_ok=True)
        if leave.is_set():
            await registry.leave()
            logger.info("sandbox host has left its sandboxes to the next one")
            os._exit(0)  # connections break as they are: what is under way goes on, and is followed again
        await runner.cleanup()
        await drain.finish()
        await registry.close()
        await heartbeat.deregister()
        logger.info("sandbox host has stopped")


async def _drain(config: Settings, drain: Drain, signals: tuple[asyncio.Event, asyncio.Event]) -> None:
    """Let commands end; a second signal ends the wait."""
    for event in signals:
        event.clear()
    again = [asyncio.create_task(event.wait()) for event in signals]
    draining = asyncio.create_task(drain.run(config.host_drain_grace_s))
    await asyncio.wait([*again, draining], return_when=asyncio.FIRST_COMPLETED)
    for task in (*again, draining):
        task.cancel()


def main() -> None:
    """Entry point of the process."""
    config = settings()
    logs.configure("host", config.log_level)
    logins.keep_fresh(config)
    instance = os.environ.get("SANDFLEET_INSTANCE", "default")
    tracing.start("sandfleet-host", config, **{"sandfleet.host_id": Owner.of_host(config, instance).host_id})
    metrics_server.serve(config.metrics_listen)
    try:
        asyncio.run(serve(config, instance))
    except SandfleetError as error:
        logger.error(error.message)
        sys.exit(1)
    flushing = threading.Thread(target=tracing.stop, args=(_FLUSH_S,), daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)


if __name__ == "__main__":
    main()
