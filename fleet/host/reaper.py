"""Removes what sandbox hosts that are gone have left: containers, networks, folders, and the rules that nobody uses.

PostgreSQL says which hosts there are. A host that has been silent for longer than the grace period, or is not known at
all for as long, is dead unless its folder, which it holds locked, shows here that it lives. What it made carries its name
and that of the deployment; nothing else is touched. Every step may be repeated and the host's row goes last, so whoever
comes after a reaper that was killed finds what is left.
"""

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import LiteralString, NamedTuple

import psycopg

from sandfleet.fleet.host import firewall, metrics
from sandfleet.fleet.host.backend import Abandonable, Backend
from sandfleet.fleet.host.heartbeat import Heartbeat
from sandfleet.fleet.host.labels import Owner, machine
from sandfleet.fleet.host.own_folder import REST, SANDBOXES, STATE, is_reaped, of_the_dead
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.fault_points import reach

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_SANDBOX_ID = re.compile(r"[0-9a-f]{16}")

_HOSTS: LiteralString = """
    select host_id, folder, machine, heartbeat_at::text,
           extract(epoch from clock_timestamp() - heartbeat_at)::float8
    from hosts
"""
_FORGET: LiteralString = "delete from hosts where host_id = %s and heartbeat_at = %s::timestamptz"


class _Known(NamedTuple):
    """A row of hosts. ``heartbeat_at`` is only compared."""

    host_id: str
    folder: str | None
    machine: str | None
    heartbeat_at: str
    silent_s: float

    @property
    def owner(self) -> Owner | None:
        """As labels name it; None for a host of an earlier version, whose things carry no such labels."""
        return None if self.folder is None else Owner(self.host_id, self.folder)


class Reaped(NamedTuple):
    """How many of each a pass has removed."""

    containers: int
    networks: int
    folders: int


class Reaper:
    """One host's; several at work do not harm each other."""

    def __init__(
        self,
        database_url: str,
        backend: Backend,
        heartbeat: Heartbeat,
        own: Owner,
        owned: Callable[[], Collection[str]],
        *,
        every_s: float,
        grace_s: float,
    ) -> None:
        self._database_url = database_url
        self._backend = backend
        self._heartbeat = heartbeat
        self._own = own
        self._owned = owned
        self._every_s = every_s
        self._grace_s = grace_s
        self._unknown_since: dict[Owner | None, float] = {}  # monotonic; None: the rules that nobody uses

    async def run(self) -> None:
        """For ever: look every ``every_s``. What cannot be done now is done by a later pass."""
        while True:
            await asyncio.sleep(self._every_s)
            # When PostgreSQL was away all hosts seem silent until they have had time to speak again.
            if self._heartbeat.steady_s() < self._grace_s:
                continue
            try:
                reaped = await self.reap()
            except (SandfleetError, psycopg.Error, OSError, TimeoutError) as error:
                logger.warning("the reaper's pass was broken off", extra={"error": type(error).__name__})
                continue
            for what, count in reaped._asdict().items():
                metrics.REAPED.labels(what).inc(count)
            if any(reaped):
                logger.warning("removed what hosts that are gone have left", extra=reaped._asdict())

    async def reap(self) -> Reaped:
        """One pass. Raises what PostgreSQL or the engine raise before anything was removed."""
        known = {row.host_id: row for row in await self._hosts()}
        things: dict[Owner, list[Abandonable]] = {}
        for thing in await self._backend.others():
            things.setdefault(thing.owner, []).append(thing)
        here = machine()
        silent = {
            owner
            for row in known.values()
            if (owner := row.owner) is not None and row.machine == here and row.silent_s > self._grace_s
        }
        found = []
        for owner in self._dead({*things, *silent} - {self._own}, known):
            found.append(await self._reap(owner, things.get(owner, []), known.get(owner.host_id)))
            reach("reaper.forgotten")
        await self._remove_rules()
        return Reaped(*(sum(each) for each in zip(*found, strict=True))) if found else Reaped(0, 0, 0)

    async def _reap(self, owner: Owner, things: list[Abandonable], row: _Known | None) -> Reaped:
        """Remove what one host has left, and forget the host if that was all."""
        if owner.folder == self._own.folder:  # this host under another name: what is in the folder is ours
            things = [thing for thing in things if thing.sandbox_id not in self._owned()]
            return await self._clear(things, [], row)
        # To the end: a host that came back meanwhile would adopt what is being removed.
        with of_the_dead(Path(owner.folder)) as dead:
            if dead:
                return await self._clear(things, _left_in(owner, things), row)
        if not is_reaped(Path(owner.folder)):
            logger.warning("PostgreSQL does not hear of a host that lives", extra={"host": owner.host_id})
        return Reaped(0, 0, 0)

    async def _clear(self, things: list[Abandonable], left: list[Path], row: _Known | None) -> Reaped:
        removed = await self._remove(things, left)
        if row is not None and removed == _counted(things, left):
            await self._forget(row)
        return removed

    def _dead(self, owners: Iterable[Owner], known: dict[str, _Known]) -> list[Owner]:
        """Those of ``owners`` that have been silent, or unknown to PostgreSQL, for longer than the grace period."""
        dead, now = [], time.monotonic()
        unknown = set()
        for owner in owners:
            row = known.get(owner.host_id)
            if row is not None and row.folder == owner.folder:
                if row.silent_s > self._grace_s:
                    dead.append(owner)
            else:  # or its host has another folder now
                unknown.add(owner)
                if now - self._unknown_since.setdefault(owner, now) >= self._grace_s:
                    dead.append(owner)
        for known_now in set(self._unknown_since) - unknown - {None}:
            del self._unknown_since[known_now]
        return dead

    async def _remove(self, things: list[Abandonable], folders: list[Path]) -> Reaped:
        """Remove all of these; those that cannot be removed now are not counted."""
        containers = await self._remove_each([thing for thing in things if not thing.is_network])
        reach("reaper.containers")
        networks = await self._remove_each([thing for thing in things if thing.is_network])
        reach("reaper.networks")
        removed = 0
        for folder in folders:
            removed += await asyncio.to_thread(_remove_folder, folder)
            reach("reaper.folder")
        return Reaped(containers, networks, removed)

    async def _remove_each(self, things: list[Abandonable]) -> int:
        async def remove(thing: Abandonable) -> bool:
            with suppress(SandfleetError):
                await self._backend.remove(thing)
                reach("reaper.one")
                return True
            return False

        return sum(await asyncio.gather(*(remove(thing) for thing in things)))

    async def _remove_rules(self) -> None:
        """Hosts that were killed leave the machine's rules for networks behind."""
        with suppress(SandfleetError):
            if not await firewall.unused():
                self._unknown_since.pop(None, None)
            elif time.monotonic() - self._unknown_since.setdefault(None, time.monotonic()) >= self._grace_s:
                await firewall.uninstall()
                logger.warning("removed rules for networks that nobody uses")

    async def _hosts(self) -> list[_Known]:
        async with asyncio.timeout(_ANSWER_S), await self._connection() as connection:
            return [_Known(*row) for row in await (await connection.execute(_HOSTS)).fetchall()]

    async def _forget(self, row: _Known) -> None:
        """Unless it has spoken since."""
        async with asyncio.timeout(_ANSWER_S), await self._connection() as connection:
            await connection.execute(_FORGET, (row.host_id, row.heartbeat_at))

    async def _connection(self) -> psycopg.AsyncConnection:
        return await psycopg.AsyncConnection.connect(
            self._database_url, autocommit=True, connect_timeout=5, application_name="sandfleet-host-reaper"
        )


def _counted(things: list[Abandonable], folders: list[Path]) -> Reaped:
    networks = sum(thing.is_network for thing in things)
    return Reaped(len(things) - networks, networks, len(folders))


def _left_in(owner: Owner, things: list[Abandonable]) -> list[Path]:
    """What a host that is dead has left in its folder. Of sandboxes, only what is named like one."""
    folder = Path(owner.folder)
    left = {folder / SANDBOXES / thing.sandbox_id for thing in things if thing.sandbox_id is not None}
    with suppress(OSError):
        left |= {path for path in (folder / SANDBOXES).iterdir() if _SANDBOX_ID.fullmatch(path.name)}
    left |= {folder / STATE, *(folder / name for name in REST)}
    return sorted(path for path in left if path.is_dir() and not path.is_symlink())


def _remove_folder(folder: Path) -> bool:
    """Whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)
