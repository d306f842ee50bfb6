"""What a host's sandboxes may use up together: memory, process ids, disk, and how many they are."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import Template

# A sandbox's limit is what it may take, not what it takes: idle ones need 5 to 10 MiB and one process.
_OVERCOMMIT = 4
_NO_LIMIT = 2**62


class Capacity(NamedTuple):
    """Sums of the limits of sandboxes: memory in bytes, processes and threads, their number, and bytes on disk."""

    memory: int
    pids: int
    sandboxes: int
    disk: int = _NO_LIMIT

    @classmethod
    def of_host(cls, config: Settings) -> "Capacity":
        """What the settings say, or else the machine's memory and process ids four times overcommitted, and all disk."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        kernel = Path("/proc/sys/kernel")
        pids = min(int((kernel / name).read_text()) for name in ("pid_max", "threads-max"))
        return cls(
            config.host_memory_bytes or _OVERCOMMIT * memory,
            config.host_pids or _OVERCOMMIT * pids,
            config.host_sandboxes,
            config.host_disk_bytes or _NO_LIMIT,
        )

    @classmethod
    def of(cls, templates: Iterable[Template]) -> "Capacity":
        """What sandboxes of these templates take."""
        made_of = list(templates)
        return cls(
            sum(t.memory for t in made_of),
            sum(t.pids for t in made_of),
            len(made_of),
            sum(t.disk for t in made_of),
        )

    def plus(self, other: "Capacity") -> "Capacity":
        """The sum."""
        return Capacity(*(one + two for one, two in zip(self, other, strict=True)))

    def room(self, taken: "Capacity", template: Template) -> int:
        """How many sandboxes of a template fit beside those that are there. A host takes at least one, if its disk does."""
        fit = min(
            (self.memory - taken.memory) // template.memory,
            (self.pids - taken.pids) // template.pids,
            self.sandboxes - taken.sandboxes,
        )
        fit = max(0 if taken.sandboxes else 1, fit)
        return min(fit, max(0, self.disk - taken.disk) // template.disk) if template.disk else fit
