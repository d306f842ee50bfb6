"""What a host remembers of runs: the highest attempt that has spoken, and which attempts know that a sandbox was lost."""

import time
from collections.abc import Container

from sandfleet.fleet.sandbox.errors import StaleAttempt
from sandfleet.shared.ids import Fence, RunKey

# A token lives no longer than a lease, and a lease not longer than minutes: after an hour no old attempt can speak.
_REMEMBER_S = 3600.0


class _Seen:
    """The highest attempt of a run, and when it was last heard of (monotonic)."""

    def __init__(self) -> None:
        self.attempt = 0
        self.at = time.monotonic()


class _Loss:
    """Why a run's sandbox ended, and the latest attempt that heard of it."""

    def __init__(self, reason: str, told: int) -> None:
        self.reason = reason
        self.told = told


class Attempts:
    """Of all runs that have spoken to this host within an hour, or have a sandbox on it."""

    def __init__(self) -> None:
        self._seen: dict[RunKey, _Seen] = {}
        self._lost: dict[RunKey, _Loss] = {}

    def admit(self, fence: Fence) -> bool:
        """Note that this attempt spoke. Whether it is the first word of a later one. StaleAttempt if a later one has spoken."""
        seen = self._seen.setdefault(fence.key, _Seen())
        seen.at = time.monotonic()
        if fence.attempt < seen.attempt:
            raise StaleAttempt("A later attempt of this run has taken the sandbox over.")
        is_later = fence.attempt > seen.attempt
        seen.attempt = fence.attempt
        return is_later

    def refuse_superseded(self, fence: Fence) -> None:
        """StaleAttempt if a later attempt has spoken since this one was admitted: its request took its time to come whole."""
        if fence.attempt < self.highest(fence.key):
            raise StaleAttempt("A later attempt of this run has taken the sandbox over.")

    def remember(self, fence: Fence) -> None:
        """Know of an attempt from an earlier life of this host."""
        seen = self._seen.setdefault(fence.key, _Seen())
        seen.attempt = max(seen.attempt, fence.attempt)

    def highest(self, key: RunKey) -> int:
        """0 for a run that has not spoken."""
        return self._seen[key].attempt if key in self._seen else 0

    def lose(self, key: RunKey, reason: str, told: int = 0) -> None:
        """The run's sandbox is gone; ``told``: the latest attempt that has heard of it."""
        self._lost[key] = _Loss(reason, told)

    def lose_unless_known(self, key: RunKey, reason: str) -> None:
        """As `lose`, where it may be known better why."""
        self._lost.setdefault(key, _Loss(reason, 0))

    def tell(self, fence: Fence) -> str | None:
        """Why the run's sandbox was lost, if this attempt has not heard of it."""
        loss = self._lost.get(fence.key)
        if loss is None or loss.told >= fence.attempt:
            return None
        loss.told = fence.attempt
        return loss.reason

    def tell_or_forget(self, fence: Fence) -> str | None:
        """As `tell`: who knows of the loss and comes again has accepted it."""
        reason = self.tell(fence)
        if reason is None:
            self.forget_loss(fence.key)
        return reason

    def forget_loss(self, key: RunKey) -> None:
        """Nobody has to hear of it any more."""
        self._lost.pop(key, None)

    def forget_old(self, but: Container[RunKey]) -> None:
        """Forget runs that have long been silent, ``but`` those that have a sandbox."""
        now = time.monotonic()
        for key in [key for key, seen in self._seen.items() if now - seen.at > _REMEMBER_S]:
            if key not in but:
                del self._seen[key]
                self.forget_loss(key)
