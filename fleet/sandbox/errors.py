"""What can go wrong with a sandbox, on both sides of the host's API. Every message is fit for a model to read."""

from sandfleet.shared.errors import HostUnavailable, NoRoom, SandboxError, SandfleetError, Superseded
from sandfleet.shared.sandbox_token import SandboxTokenExpired


class SandboxLost(SandboxError):
    """The sandbox ended. What the next use finds, the message says: nothing, or the files of a snapshot."""

    code = "sandbox_lost"
    status = 410

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reason = message
        """Why, without what the next use finds."""
        self.files_kept = False
        """Whether its host kept its files as it ended it, and the next use finds them."""


class NoSandbox(SandboxError):
    """The run has no sandbox on this host; create it first."""

    code = "no_sandbox"
    status = 404


class TemplateUnavailable(SandboxError):
    """The host cannot make sandboxes of the template that the run was given; the message says why."""

    code = "template_unavailable"
    status = 422


class SandboxBusy(SandboxError):
    """Too many operations at once in one sandbox."""

    code = "sandbox_busy"
    status = 429


class OperationRefused(SandboxError):
    """The sandbox could not do what was asked (no such file, not a directory, a command that cannot start …).

    ``code`` is one of the agent's, as ``docs/sandbox-protocol.md`` lists them.
    """

    status = 422

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        if code in ("not_found", "no_process"):
            self.status = 404


class SnapshotFailed(SandboxError):
    """The workspace could not be saved or restored; the sandbox goes on."""

    code = "snapshot_failed"
    status = 422


class SnapshotDamaged(SnapshotFailed):
    """What the bucket has is no whole snapshot: it is given up, and the next use finds an empty sandbox."""


class TooManySnapshots(SandboxError):
    """The tenant keeps as many snapshots as it may."""

    code = "too_many_snapshots"
    status = 429


class StaleAttempt(Superseded):
    """A later attempt of the run has used this sandbox; this one is refused for good."""

    status = 403


_KINDS: dict[str, type[SandfleetError]] = {
    kind.code: kind
    for kind in (
        HostUnavailable,
        NoRoom,
        NoSandbox,
        SandboxBusy,
        SandboxLost,
        SandboxTokenExpired,
        SnapshotFailed,
        StaleAttempt,
        TemplateUnavailable,
        TooManySnapshots,
    )
}


def from_host(code: str, message: str) -> SandfleetError:
    """The error that a host's answer stands for; what has no class of its own was refused by the sandbox."""
    kind = _KINDS.get(code)
    return OperationRefused(code, message) if kind is None else kind(message)
