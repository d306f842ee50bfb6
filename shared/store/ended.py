"""Runs that were ended by another than the executor that held them, as ``end_run`` journals their last events."""

from typing import NamedTuple
from uuid import UUID


class EndedRun(NamedTuple):
    """A run that is over, the attempt that its end was journalled for, and its error as JSON text."""

    run_id: UUID
    attempt: int
    error: str | None
