"""What a host has to know of its sandboxes after it was started again: a file for each, in a folder that none of them sees."""

import json
import logging
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from sandfleet.shared.ids import RunKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A sandbox of a run. ``secret`` proves its agent, ``born_at`` is on CLOCK_BOOTTIME, ``attempt`` the highest seen,
    ``made_for`` the one that it was made for."""

    sandbox_id: str
    tenant: str
    user_id: str
    run_id: str
    attempt: int
    template: str
    handle: str
    secret: str
    born_at: float
    made_for: int = 0

    @property
    def key(self) -> RunKey:
        """Its run."""
        return RunKey(self.tenant, self.user_id, uuid.UUID(self.run_id))


_KEPT = TypeAdapter(Kept)


class StateFolder:
    """The files. They are small and written seldom: when a sandbox gets its run, and when a later attempt comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, kept: Kept) -> None:
        """Write or replace one in one step."""
        draft = self._folder / f"{kept.sandbox_id}.draft"
        draft.write_text(json.dumps(asdict(kept)))
        draft.replace(self._folder / f"{kept.sandbox_id}.json")

    def remove(self, sandbox_id: str) -> None:
        """Forget one; fine if there is none."""
        (self._folder / f"{sandbox_id}.json").unlink(missing_ok=True)

    def load(self) -> list[Kept]:
        """All that can be read; what a newer version has noted besides is left out. The rest, and drafts, are removed."""
        for draft in self._folder.glob("*.draft"):
            draft.unlink(missing_ok=True)
        found = []
        for path in self._folder.glob("*.json"):
            try:
                kept = _KEPT.validate_json(path.read_bytes())
                uuid.UUID(kept.run_id)
            except (OSError, ValueError) as error:
                logger.warning("a sandbox's state cannot be read", extra={"error": type(error).__name__})
                path.unlink(missing_ok=True)
            else:
                found.append(kept)
        return found
