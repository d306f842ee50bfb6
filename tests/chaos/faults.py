"""Carries a schedule out on a running stack, and starts again whatever dies."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import redis.asyncio
from redis.exceptions import RedisError

from sandfleet.localstack.process import Process
from sandfleet.localstack.stack import Stack
from sandfleet.shared.permits import Permits
from sandfleet.shared.rings import ring, ring_key
from sandfleet.shared.settings import Settings
from tests.chaos.schedule import APIS, EXECUTORS, HOST, Fault, Kind

POOL = "default"

_DOWN_S = 0.3  # how long something that died stays away
_MESSAGES = 20  # permits or rings in one fault
_SIGNALS = {
    Kind.KILL: signal.SIGKILL,
    Kind.TERM: signal.SIGTERM,
    Kind.REDIS_KILL: signal.SIGKILL,
    Kind.POSTGRES_STOP: signal.SIGINT,
    Kind.POSTGRES_CRASH: signal.SIGQUIT,
}
# A drain, and what an overloaded machine adds to it. Longer than that is a fault of its own.
_TERM_LIMIT_S = 60.0


class Faults:
    """The faults on one stack. ``carried_out`` counts by kind; ``problems`` names processes that ended by themselves, or
    did not end when they were asked to."""

    def __init__(self, stack: Stack, points: Path, say: Callable[[str], None]) -> None:
        """``points`` is the folder where the stack's processes look for fault points."""
        self.carried_out: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        """How often each process had to be started again."""
        self.problems: list[str] = []
        self._stack = stack
        self._points = points
        self._say = say
        self._redis = redis.asyncio.Redis.from_url(
            stack.info.redis_url, socket_timeout=2, socket_connect_timeout=2
        )
        self._permits = Permits(
            Settings(aws_endpoint_url=stack.info.aws_endpoint_url, queue_urls=stack.info.queue_urls)
        )
        self._stopped: set[str] = set()
        self._asked_to_end: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def restarting(self) -> AsyncIterator[None]:
        """Within this block what dies is started again; after it everything runs that should."""
        keeper = asyncio.create_task(self._keep_alive())
        try:
            yield
        finally:
            await self._calm_down()
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await self._redis.aclose()
            await self._permits.aclose()

    async def carry_out(self, faults: Iterator[Fault]) -> None:
        """Do what the schedule says, for ever. A fault whose time is past, since the machine was slow, comes at once."""
        begun = time.monotonic()
        for fault in faults:
            await asyncio.sleep(max(0.0, begun + fault.at_s - time.monotonic()))
            self._say(str(fault))
            task = asyncio.create_task(self._do(fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def recover(self) -> None:
        """No fault lasts any longer."""
        for task in self._tasks:
            task.cancel()

    async def _do(self, fault: Fault) -> None:
        """What cannot be done, since its target is down already, is no fault."""
        with suppress(RedisError, OSError, TimeoutError):
            if await self._done(fault):
                self.carried_out[fault.kind] += 1

    async def _done(self, fault: Fault) -> bool:
        match fault.kind:
            case Kind.STOP | Kind.QUEUE_STOP:
                return await self._stop(fault.target, fault.duration_s)
            case Kind.FREEZE:
                return await self._freeze(fault.target, fault.duration_s)
            case Kind.RINGS_DROPPED:
                return bool(await self._redis.delete(ring_key(POOL)))
            case Kind.RINGS_DOUBLED:
                await ring(self._redis, {POOL: _MESSAGES})
            case Kind.REDIS_FLUSH:
                await self._redis.flushall()
            case Kind.PERMITS_DROPPED:
                return await self._drop_permits()
            case Kind.PERMITS_DOUBLED:
                await self._permits.send(POOL, _MESSAGES)
            case _:
                return self._signal(fault.target, _SIGNALS[fault.kind])
        return True

    def _signal(self, name: str, number: signal.Signals) -> bool:
        process = self._process(name)
        if process.pid is None:
            return False
        if number == signal.SIGTERM:
            self._asked_to_end.setdefault(name, time.monotonic())
        process.send(number)
        return True

    async def _stop(self, name: str, duration_s: float) -> bool:
        process = self._process(name)
        if process.pid is None or name in self._stopped:
            return False
        self._stopped.add(name)
        process.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(duration_s)
        finally:
            process.send(signal.SIGCONT)
            self._stopped.discard(name)
        return True

    async def _freeze(self, point: str, duration_s: float) -> bool:
        armed = self._points / point
        if armed.exists():
            return False
        ready = self._points / f".{point}"
        ready.write_text("stop")
        ready.rename(armed)  # no process may find it empty
        try:
            while armed.exists():
                await asyncio.sleep(0.05)
        finally:
            armed.unlink(missing_ok=True)
        (taken,) = self._points.glob(f"{point}.reached-by-*")
        pid = int(taken.name.rpartition("-")[2])
        taken.unlink()
        # (None for the process that an executor has started for suspects.)
        names = {name for name, p in self._stack.supervisor.processes.items() if p.pid == pid}
        self._stopped |= names
        self._say(f"{names or pid} is frozen at {point}")
        try:
            await asyncio.sleep(duration_s)
        finally:
            self._stopped -= names
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return True

    async def _drop_permits(self) -> bool:
        async with asyncio.timeout(2):
            handles = await self._permits.receive(POOL, _MESSAGES, wait_s=0, visibility_s=30)
            await self._permits.delete(POOL, handles)
        return bool(handles)

    def _process(self, name: str) -> Process:
        return self._stack.supervisor.processes[name]

    async def _keep_alive(self) -> None:
        """Start again what is dead. Like an orchestrator: it takes a moment, and does not wait until they are ready."""
        names = (*APIS, *EXECUTORS, HOST, "postgres", "redis")
        dead_since: dict[str, float] = {}
        while True:
            now = time.monotonic()
            for name in names:
                process = self._process(name)
                process.wanted = False  # by the supervisor, which waits longer each time
                if process.pid is not None:
                    dead_since.pop(name, None)
                    self._look_for_stuck(name, process, now)
                elif now > dead_since.setdefault(name, now) + _DOWN_S:
                    self._note_death(name, process)
                    process.kill_group()
                    process.spawn()
            await asyncio.sleep(0.05)

    def _note_death(self, name: str, process: Process) -> None:
        """They end with 0 after SIGTERM (uvicorn, and whoever had just begun, by the signal), by our SIGKILL or poison."""
        self.deaths[name] += 1
        asked = self._asked_to_end.pop(name, None) is not None
        wanted = {-signal.SIGKILL} | ({0, -signal.SIGTERM} if asked else set())
        if name in (*APIS, *EXECUTORS, HOST) and process.exit_code not in wanted:
            why = process.log_tail(3)
            self.problems.append(f"{name} ended with exit code {process.exit_code} by itself: {why}")

    def _look_for_stuck(self, name: str, process: Process, now: float) -> None:
        if name in self._stopped:  # it cannot know yet
            self._asked_to_end = {n: now if n == name else t for n, t in self._asked_to_end.items()}
        elif now > self._asked_to_end.get(name, now) + _TERM_LIMIT_S:
            del self._asked_to_end[name]
            self.problems.append(f"{name} still ran {_TERM_LIMIT_S:.0f} s after SIGTERM")
            process.send(signal.SIGABRT)

    async def _calm_down(self) -> None:
        self.recover()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        names = (*APIS, *EXECUTORS, HOST, "postgres", "redis")
        while any(
            self._wake(name) or self._process(name).pid is None or name in self._asked_to_end
            for name in names
        ):
            await asyncio.sleep(0.1)

    def _wake(self, name: str) -> bool:
        """Whether a process was stopped at a point after we had given up on it; it goes on now."""
        with suppress(psutil.Error):
            process = psutil.Process(self._process(name).pid or 0)
            if name in EXECUTORS and process.status() == psutil.STATUS_STOPPED:
                process.resume()
                return True
        return False
