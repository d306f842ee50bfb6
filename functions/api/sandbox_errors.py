"""What can go wrong with a sandbox, as the API tells it."""

from typing import Any
from uuid import UUID

from sandfleet.shared.errors import SandboxError, TooManyRequests


class TooManySandboxes(TooManyRequests):
    """The tenant has as many sandboxes as it may have."""

    code = "too_many_sandboxes"


class SnapshotTooLarge(SandboxError):
    """The sandbox cannot hold the snapshot's files."""

    code = "snapshot_failed"
    status = 422


class HostRefused(SandboxError):
    """A host's own refusal, with its code and status."""

    def __init__(self, code: str, status: int, message: str, retry_after_s: int | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.code = code
        self.status = status


class SandboxLost(SandboxError):
    """The sandbox that the caller knew is gone, and another one is in its place. The message and ``extra`` say what is in it:
    nothing, or the files of a snapshot."""

    code = "sandbox_lost"
    status = 410

    def __init__(self, reason: str, generation: int, restored: UUID | None) -> None:
        what = (
            "Its files and processes are gone; the next use finds an empty sandbox."
            if restored is None
            else f"Its processes are gone, and its files are as in the snapshot {restored}."
        )
        super().__init__(f"{reason} {what}")
        self.extra: dict[str, Any] = {
            "generation": generation,
            "restored": None if restored is None else str(restored),
        }
