"""The database's clock, kept by a host that may be cut off from the database."""

import time


class DatabaseClock:
    """Epoch seconds of the database, from the last answer that came and this machine's clock since.

    It uses CLOCK_BOOTTIME, which no one sets and which goes on while the machine is suspended.
    """

    def __init__(self) -> None:
        self._offset: float | None = None
        self._heard_at = 0.0

    @staticmethod
    def local() -> float:
        """Seconds of this machine's own clock, for the two ends of a question to the database."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def heard(self, database_time: float, asked_at: float, answered_at: float) -> None:
        """Note the answer to a question that was under way between two local times."""
        # Taken at the latest possible moment of the answer the clock runs early by at most the question's duration,
        # so the middle halves the error; it stays far below a lease.
        self._offset = database_time - (asked_at + answered_at) / 2
        self._heard_at = answered_at

    def now(self) -> float | None:
        """Epoch seconds of the database's clock; None before the first answer."""
        return None if self._offset is None else self.local() + self._offset

    def age_s(self) -> float | None:
        """Seconds since the database was last heard of; None before the first answer."""
        return None if self._offset is None else self.local() - self._heard_at
