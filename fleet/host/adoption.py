"""Taking over the sandboxes that an earlier life of this host has left. None of them holds up another, or the host."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from sandfleet.fleet.host.backend import Backend, Launch
from sandfleet.fleet.host.clock import DatabaseClock
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.host.state import Kept, StateFolder
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.ids import RunKey
from sandfleet.shared.templates import Template

logger = logging.getLogger(__name__)


class Adoptions:
    """Those of which it is not known yet whether they are still there."""

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        state: StateFolder,
        templates: Mapping[str, Template],
        known: Callable[[Kept, Sandbox | None], None],
    ) -> None:
        """``folder`` is that of the sandboxes; ``known`` is told of each what there is, None if nothing is left of it."""
        self._backend = backend
        self._folder = folder
        self._state = state
        self._templates = templates
        self._known = known
        self._under_way: dict[RunKey, tuple[Kept, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def keys(self) -> list[RunKey]:
        """Their runs."""
        return list(self._under_way)

    def made_of(self) -> list[Template]:
        """What they take room for."""
        names = [kept.template for kept, _ in self._under_way.values()]
        return [self._templates[name] for name in names if name in self._templates]

    def begin(self) -> list[Kept]:
        """Begin with all that the state names: of a run's, the last that was made."""
        found: dict[RunKey, Kept] = {}
        for kept in sorted(self._state.load(), key=lambda kept: kept.born_at):
            if earlier := found.get(kept.key):
                self._state.remove(earlier.sandbox_id)
            found[kept.key] = kept
        for kept in found.values():
            task = asyncio.create_task(self._adopt(kept), name=f"adopt sandbox {kept.sandbox_id}")
            self._under_way[kept.key] = kept, task
        return list(found.values())

    async def settled(self, *keys: RunKey) -> None:
        """Wait until it is known of these."""
        if tasks := [self._under_way[key][1] for key in keys if key in self._under_way]:
            await asyncio.wait(tasks)

    async def _adopt(self, kept: Kept) -> None:
        sandbox = None
        try:
            sandbox = await self._take_over(kept)
        except Exception as error:  # whatever is wrong with one of them: the others' host goes on
            about = {"run_id": kept.run_id, "tenant": kept.tenant, "error": type(error).__name__}
            logger.error("a sandbox could not be adopted", extra=about)
        if sandbox is None:
            await self._give_up(kept)
        del self._under_way[kept.key]
        self._known(kept, sandbox)

    async def _take_over(self, kept: Kept) -> Sandbox | None:
        folder = self._folder / kept.sandbox_id
        template = self._templates.get(kept.template)
        if template is None or not folder.is_dir():
            return None
        launch = Launch(kept.sandbox_id, kept.key, folder, template)
        with suppress(SandfleetError):
            if sandbox := await Sandbox.adopt(self._backend, launch, kept.handle, kept.secret):
                sandbox.born = time.monotonic() - (DatabaseClock.local() - kept.born_at)
                sandbox.made_for = kept.made_for
                return sandbox
        return None

    async def _give_up(self, kept: Kept) -> None:
        """Remove what is left of it. A container that cannot be removed now is swept up, since its folder is gone."""
        self._state.remove(kept.sandbox_id)
        try:
            await self._backend.destroy(kept.handle)
        except Exception as error:
            logger.warning(
                "what a lost sandbox left is not removed yet", extra={"error": type(error).__name__}
            )
        shutil.rmtree(self._folder / kept.sandbox_id, ignore_errors=True)
