"""All sandboxes of a host: one per run, made at first use, guarded by the highest attempt that was seen."""

import asyncio
import itertools
import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sandfleet.fleet.host import disk, metrics
from sandfleet.fleet.host.adoption import Adoptions
from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.attempts import Attempts
from sandfleet.fleet.host.backend import Backend
from sandfleet.fleet.host.capacity import Capacity
from sandfleet.fleet.host.clock import DatabaseClock
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.host.snapshots import Snapshots
from sandfleet.fleet.host.state import Kept, StateFolder
from sandfleet.fleet.host.warm import Refill, WarmPool
from sandfleet.fleet.sandbox.errors import NoSandbox, SandboxLost, TemplateUnavailable
from sandfleet.shared.errors import HostUnavailable, NoRoom, SandfleetError
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.store.snapshots import Snapshot
from sandfleet.shared.templates import DEFAULT, Template, Templates

logger = logging.getLogger(__name__)

_TEND_EVERY_S = 1.0
_SWEEP_EVERY = 5  # of these
_CUT_OFF = "This sandbox host is cut off from PostgreSQL and makes no new sandboxes."
_STRAY_S = 180.0  # age of a folder that is no sandbox's; one that starts has up to a minute


class Acquired(NamedTuple):
    """A run's sandbox, whether it is new, and why the run's previous one was lost, if it was."""

    sandbox: Sandbox
    created: bool
    lost: str | None


class _Creation(NamedTuple):
    """A sandbox that is being made for a run, for one of its attempts."""

    attempt: int
    template: Template
    task: asyncio.Task[Sandbox]


class Registry:
    """Creates, finds and removes sandboxes, as many as its capacity holds. While ``draining`` it makes no new ones."""

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        agent: AgentFiles,
        templates: Templates,
        *,
        state: StateFolder,
        capacity: Capacity,
        refill: Refill,
        snapshots: Snapshots,
    ) -> None:
        self.capacity = capacity
        self.draining = False
        self.room_made = asyncio.Event()
        """A sandbox has gone since somebody cleared this."""
        makeable = [t for t in templates.templates.values() if t.name not in backend.refused]
        self.warm = WarmPool(refill, makeable, self._start_warm, self._destroy, self._may_warm)
        self._agent = agent
        self._backend = backend
        self._folder = folder
        self._state = state
        self._templates = templates.templates
        self.snapshots = snapshots
        self._sandboxes: dict[RunKey, Sandbox] = {}
        self._creating: dict[RunKey, _Creation] = {}
        self._attempts = Attempts()
        self._doomed: set[Sandbox] = set()  # to be destroyed, again if the engine did not answer
        self._going: set[Sandbox] = set()  # those of them that are being destroyed now
        self._background: set[asyncio.Task[None]] = set()
        self._owned: set[str] = set()  # ids of all sandboxes that have started and are not removed
        self._belongs = asyncio.Event()
        self._adoptions = Adoptions(backend, folder, state, self._templates, self._known)

    def __len__(self) -> int:
        return len(self._sandboxes) + len(self._creating) + len(self._adoptions)

    def taken(self) -> Capacity:
        """What the sandboxes of runs take, those included that are being removed; warm ones make way for them."""
        made_of = [sandbox.template for sandbox in (*self._sandboxes.values(), *self._doomed)]
        coming = [creation.template for creation in self._creating.values()]
        return Capacity.of([*made_of, *coming, *self._adoptions.made_of()])

    def most(self) -> Capacity:
        """What all sandboxes may take: of disk no more than those that are there have, and is free now."""
        if not any(t.disk for t in self._templates.values()):
            return self.capacity
        held = self.taken().disk + sum(t.disk for t in self.warm.taken_by())
        free = max(0, disk.free_bytes(self._folder) - self.snapshots.disk_bytes)
        return self.capacity._replace(disk=min(self.capacity.disk, held + free))

    def room(self, template: str = DEFAULT) -> int:
        """How many more sandboxes of a template fit."""
        return 0 if self.draining else self.most().room(self.taken(), self._templates[template])

    def offers(self) -> dict[str, dict[str, float]]:
        """What sandboxes can be made of here, for those who choose a host: ``memory``, ``pids``, ``disk``,
        ``workspace`` and ``lifetime_s``."""
        return {
            t.name: {
                "memory": t.memory,
                "pids": t.pids,
                "disk": t.disk,
                "workspace": t.workspace,
                "lifetime_s": t.lifetime_s,
            }
            for t in self._templates.values()
            if t.name not in self._backend.refused
        }

    def owned(self) -> set[str]:
        """Ids of all sandboxes that this host has, or is removing."""
        return self._owned

    def _measure(self) -> None:
        """Set the gauges to what there is now."""
        counts = {
            "running": len(self._sandboxes),
            "starting": len(self._creating),
            "warm": self.warm.ready,
            "removing": len(self._doomed),
        }
        for state, count in counts.items():
            metrics.SANDBOXES.labels(state).set(count)
        for name in self._templates:
            metrics.ROOM.labels(name).set(self.room(name))
        metrics.DRAINING.set(self.draining)

    def keys(self) -> list[RunKey]:
        """Runs that have a sandbox here."""
        return [*self._sandboxes, *self._creating, *self._adoptions.keys()]

    def all_keys(self) -> list[RunKey]:
        """Those, and the runs whose sandbox is being removed."""
        return [*self.keys(), *(sandbox.key for sandbox in self._doomed if sandbox.key is not None)]

    def held(self) -> list[tuple[RunKey, Sandbox]]:
        """The sandboxes that runs have now."""
        return list(self._sandboxes.items())

    @property
    def creating(self) -> bool:
        """Whether a sandbox is being made for a run, or is one of an earlier life that is not known yet."""
        return bool(self._creating) or len(self._adoptions) > 0

    async def settled(self) -> None:
        """Wait until it is known which sandboxes of an earlier life are there."""
        await self._adoptions.settled(*self._adoptions.keys())

    def admit(self, fence: Fence) -> None:
        """Note that this attempt spoke. StaleAttempt if a later one did before; what runs for earlier ones is killed.

        Whatever is awaited after it lets a later attempt speak: who acts for this one asks ``find`` or ``acquire`` then.
        """
        if self._attempts.admit(fence) and (sandbox := self._sandboxes.get(fence.key)):
            sandbox.supersede(fence.attempt)
            self._keep(fence.key, sandbox)

    def find(self, fence: Fence) -> Sandbox:
        """The run's sandbox. SandboxLost, once per attempt, if it ended by itself; NoSandbox if there is none; StaleAttempt
        if a later attempt has spoken since this one was admitted."""
        self._attempts.refuse_superseded(fence)
        if reason := self._attempts.tell(fence):
            raise SandboxLost(reason)
        if sandbox := self._sandboxes.get(fence.key):
            sandbox.asked += 1
            return sandbox
        raise NoSandbox("This run has no sandbox on this host; create it first.")

    async def acquire(
        self, fence: Fence, template: str = DEFAULT, *, may_create: bool = True, anew: bool = False
    ) -> Acquired:
        """The run's sandbox, created from the template if it has none. Calls at once get the same one. With ``anew`` one that
        was made for an earlier attempt gives way to it.

        Raises NoRoom if the host is full, HostUnavailable if there is none and ``may_create`` is false,
        TemplateUnavailable if this host cannot make sandboxes of the template, and StaleAttempt as `find` does.
        """
        key = fence.key
        self._attempts.refuse_superseded(fence)
        if anew and self._has_earlier(fence):  # over, whether the next can be made here or not
            await self.remove(key)
            self._attempts.refuse_superseded(fence)
        if sandbox := self._sandboxes.get(key):
            sandbox.asked += 1
            return Acquired(sandbox, created=False, lost=self._attempts.tell_or_forget(fence))
        creation = self._creating.get(key)
        if created := creation is None:
            if not may_create:
                raise HostUnavailable(_CUT_OFF)
            made_of = self._template(template)
            if not self.room(template):
                raise NoRoom(
                    f"This host has no room: {len(self)} sandboxes take what it gives; try again when one has ended."
                )
            self._make_way(made_of)
            task = asyncio.create_task(self._create(fence, made_of), name=f"create sandbox for {key.run_id}")
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # maybe nobody waits
            creation = self._creating[key] = _Creation(fence.attempt, made_of, task)
        sandbox = await asyncio.shield(creation.task)
        self._attempts.refuse_superseded(fence)
        return Acquired(sandbox, created, self._attempts.tell_or_forget(fence))

    def _has_earlier(self, fence: Fence) -> bool:
        """Whether there is, or is being made, a sandbox for an attempt before this one."""
        if creation := self._creating.get(fence.key):
            return creation.attempt < fence.attempt
        sandbox = self._sandboxes.get(fence.key)
        return sandbox is not None and sandbox.made_for < fence.attempt

    def _template(self, name: str) -> Template:
        template = self._templates.get(name)
        if template is None:
            known = ", ".join(sorted(self._templates))
            raise TemplateUnavailable(
                f"This sandbox host has no template {name!r}, only {known}: give it the same sandfleet.toml as the "
                "executors, and start it again."
            )
        if reason := self._backend.refused.get(name):
            raise TemplateUnavailable(reason)
        return template

    def _make_way(self, template: Template) -> None:
        """Give up warm sandboxes until one of this template fits beside those that are left, unless one is ready."""
        while not self.warm.has(template) and not self._fits_beside_warm(template) and self.warm.evict():
            pass

    def _fits_beside_warm(self, template: Template) -> bool:
        taken, warm = self.taken(), Capacity.of(self.warm.taken_by())
        return self.most().room(taken.plus(warm), template) > 0

    async def _create(self, fence: Fence, template: Template) -> Sandbox:
        start = time.monotonic()
        key = fence.key
        try:
            warm = await self.warm.take(template)
            if warm is not None:
                sandbox = warm
                sandbox.belong_to(key)
            else:
                sandbox = await Sandbox.launch(self._backend, key, self._folder, self._agent, template)
                self._serve_in_background(sandbox)
            try:
                await self._restore(sandbox, fence)
                if not sandbox.alive:  # who serves it has seen it end while it was nobody's, and told nobody
                    raise HostUnavailable("The sandbox ended while it was made ready; try again.")
            except BaseException:
                await self._destroy(sandbox)
                raise
        finally:
            del self._creating[key]
        sandbox.made_for = fence.attempt
        self._sandboxes[key] = sandbox
        if (highest := self._attempts.highest(key)) > fence.attempt:
            sandbox.supersede(highest)
        self._keep(key, sandbox)
        spent_s = time.monotonic() - start
        metrics.ACQUIRES.labels("cold" if warm is None else "warm").observe(spent_s)
        about = {
            "sandbox": sandbox.id,
            **_about(key),
            "ms": round(spent_s * 1000),
            "warm": warm is not None,
        }
        logger.info("sandbox created", extra=about)
        return sandbox

    def _keep(self, key: RunKey, sandbox: Sandbox) -> None:
        """Note what the next life of this host has to know of it."""
        if self._backend.patience_s > 0:
            self._state.save(
                Kept(
                    sandbox.id,
                    key.tenant,
                    key.user_id,
                    str(key.run_id),
                    self._attempts.highest(key),
                    sandbox.template.name,
                    sandbox.handle,
                    sandbox.secret,
                    DatabaseClock.local() - (time.monotonic() - sandbox.born),
                    sandbox.made_for,
                )
            )

    async def adopted(self, key: RunKey) -> None:
        """Wait until it is known whether the sandbox that the run had in an earlier life of this host is still there."""
        await self._adoptions.settled(key)

    def _known(self, kept: Kept, sandbox: Sandbox | None) -> None:
        """What has become of a sandbox of an earlier life of this host."""
        key = kept.key
        if sandbox is None:
            self._attempts.lose(key, "The sandbox was lost: it ended while its host was away.")
            self._owned.discard(kept.sandbox_id)
            return
        self._sandboxes[key] = sandbox
        self._serve_in_background(sandbox)
        if (highest := self._attempts.highest(key)) > kept.attempt:  # it has spoken since this host is back
            sandbox.supersede(highest)
            self._keep(key, sandbox)

    def belong_to(self, deployment: str) -> None:
        """What is made from now on belongs to this deployment, as PostgreSQL names it."""
        self._backend.belong_to(deployment)
        self._belongs.set()

    async def keep_warm(self) -> None:
        """For ever: keep the warm pool full, once its sandboxes can say which deployment they belong to."""
        await self._belongs.wait()
        await self.warm.keep()

    async def _start_warm(self, template: Template) -> Sandbox:
        sandbox = await Sandbox.launch(self._backend, None, self._folder, self._agent, template)
        self._serve_in_background(sandbox)
        return sandbox

    def _may_warm(self, template: Template) -> bool:
        """Those that somebody waits for come first."""
        return not self.draining and not self._creating and self._fits_beside_warm(template)

    def _serve_in_background(self, sandbox: Sandbox) -> None:
        self._owned.add(sandbox.id)
        server = asyncio.create_task(self._serve(sandbox), name=f"serve sandbox {sandbox.id}")
        self._background.add(server)
        server.add_done_callback(self._background.discard)

    async def _restore(self, sandbox: Sandbox, fence: Fence) -> None:
        """Give the sandbox the files that its run had, or that the interrupted run had which this one resumes."""
        snapshot, lost = await self.snapshots.find(fence.key)
        if snapshot is not None:
            await self.snapshots.restore(sandbox, fence, snapshot)
            sandbox.restored = snapshot
            if snapshot.run_id == fence.key.run_id:  # so it had a sandbox, whose end nobody here saw
                self._attempts.lose_unless_known(fence.key, "The sandbox was lost: its host has stopped.")
        if lost is not None:
            self._attempts.lose_unless_known(fence.key, lost)

    async def snapshot(self, fence: Fence, reason: str) -> Snapshot:
        """Keep the workspace of the run's sandbox. Raises as `find` does, and SnapshotFailed."""
        return await self.snapshots.take(self.find(fence), fence, reason)

    async def _serve(self, sandbox: Sandbox) -> None:
        reason = await sandbox.serve()
        key = sandbox.key
        if key is not None and self._sandboxes.get(key) is sandbox:  # it ended by itself: nobody removed it
            del self._sandboxes[key]
            self._attempts.lose(key, reason, self._attempts.highest(key) if sandbox.loss_told else 0)
            metrics.LOST.inc()
            logger.warning("sandbox lost", extra={"sandbox": sandbox.id, **_about(key)})
            await self._destroy(sandbox)
        elif self.warm.lost(sandbox):
            logger.warning("warm sandbox lost", extra={"sandbox": sandbox.id})
            await self._destroy(sandbox)

    async def remove(self, key: RunKey, attempt: int | None = None, *, lost: str | None = None) -> None:
        """Remove the run's sandbox and forget its losses, but for why this one is ``lost``; without one this does nothing. For
        an ``attempt``, unless a later one has spoken by the time that the sandbox is there."""
        await self.adopted(key)
        if creation := self._creating.get(key):
            await asyncio.wait([creation.task])  # however it ends: that is for who asked for it
        if attempt is not None and attempt < self._attempts.highest(key):
            return
        self._attempts.forget_loss(key)
        if lost is not None:  # before anything is awaited: the run's next sandbox may be made meanwhile
            self._attempts.lose(key, lost)
        if sandbox := self._sandboxes.pop(key, None):
            await self._destroy(sandbox)
            logger.info("sandbox removed", extra={"sandbox": sandbox.id, **_about(key)})

    def dismiss(self, key: RunKey, attempt: int | None = None) -> None:
        """Remove the run's sandbox in the background; for an ``attempt``, unless a later one has spoken by then."""
        removal = asyncio.create_task(self.remove(key, attempt), name=f"remove sandbox of {key.run_id}")
        self._background.add(removal)
        removal.add_done_callback(self._background.discard)

    async def _destroy(self, sandbox: Sandbox) -> None:
        self._doomed.add(sandbox)
        self._going.add(sandbox)
        try:
            self._state.remove(sandbox.id)
            await sandbox.destroy()
        except SandfleetError as error:
            logger.warning("sandbox not removed yet", extra={"sandbox": sandbox.id, "reason": error.code})
        else:
            self._doomed.discard(sandbox)
            self._owned.discard(sandbox.id)
            self.room_made.set()
        finally:
            self._going.discard(sandbox)

    async def tend(self) -> None:
        """For ever: retry removals that failed, remove what nobody owns, forget attempts of long ago."""
        for number in itertools.count(1):
            await asyncio.sleep(_TEND_EVERY_S)
            self._measure()
            await asyncio.gather(*(self._destroy(sandbox) for sandbox in self._doomed - self._going))
            if number % _SWEEP_EVERY == 0:
                with suppress(SandfleetError):
                    await self._sweep()
            self._attempts.forget_old(self.keys())

    def fence(self, key: RunKey) -> Fence:
        """The newest attempt of the run that has spoken."""
        return Fence(key, self._attempts.highest(key))

    async def end(self, key: RunKey, sandbox: Sandbox, asked: int, why: str) -> bool:
        """Keep a sandbox's workspace, if there is a bucket, and remove it; its run hears ``why``. False if it is used meanwhile:
        ``asked`` are the calls for it so far. Raises SandfleetError if its workspace cannot be kept."""
        if self.snapshots.kept:
            await self.keep_workspace(key, sandbox)
        if sandbox.asked != asked or sandbox.busy or self._sandboxes.get(key) is not sandbox:
            return False
        logger.info("idle sandbox ended", extra={"sandbox": sandbox.id, **_about(key)})
        await self.remove(key, lost=why)
        return True

    async def keep_workspace(self, key: RunKey, sandbox: Sandbox) -> None:
        """Take a snapshot for whoever has the run next. Raises SandfleetError."""
        await self.snapshots.take(sandbox, self.fence(key), "drain")

    async def open(self) -> None:
        """Begin to adopt the sandboxes that an earlier life of this host left, and remove the rest of it.

        It does not wait for them: a sandbox in which nobody answers holds up its own run alone.
        """
        left = self._adoptions.begin()
        for kept in left:
            self._attempts.remember(Fence(kept.key, kept.attempt))
            self._owned.add(kept.sandbox_id)
        for path in self._folder.iterdir():
            if path.name not in self._owned:
                shutil.rmtree(path, ignore_errors=True)
        if left:
            logger.info("adopts sandboxes", extra={"count": len(left)})
        await self._sweep()
        largest = min(self.capacity.disk, disk.most_bytes(self._folder) - self.snapshots.disk_bytes)
        for template in self._templates.values():
            if template.disk > largest:
                reason = (
                    f"Template {template.name!r} has a workspace of {template.disk // 2**20} MiB on disk, and this host gives "
                    f"{max(0, largest) // 2**20} MiB: make it smaller, or set SANDFLEET_HOST_DIR to a larger disk."
                )
                logger.error(reason)
                self._backend.refused.setdefault(template.name, reason)

    async def leave(self) -> None:
        """Go without the sandboxes of runs: the next life of this host adopts them if it comes soon."""
        self.draining = True
        await self.warm.close()

    async def _sweep(self) -> None:
        old = time.time() - _STRAY_S
        for path in list(self._folder.iterdir()):
            with suppress(OSError):
                if path.name not in self._owned and path.stat().st_mtime < old:
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await self._backend.sweep(lambda: {path.name for path in self._folder.iterdir()})

    async def close(self) -> None:
        """Remove everything; returns when no sandbox is left or the engine does not answer."""
        self.draining = True
        await self.warm.close()
        await self.settled()
        await asyncio.gather(*(self.remove(key) for key in self.keys()))
        for sandbox in list(self._doomed):
            await self._destroy(sandbox)
        await asyncio.gather(*self._background, return_exceptions=True)
        with suppress(SandfleetError):
            await self._sweep()
        await self.snapshots.aclose()


def _about(key: RunKey) -> dict[str, str]:
    return {"run_id": str(key.run_id), "tenant": key.tenant}
