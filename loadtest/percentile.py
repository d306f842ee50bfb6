"""The percentile that all tables of measurements show."""

from collections.abc import Sequence
from math import ceil


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank, of values in any order. Raises ValueError when there is none."""
    if not values:
        raise ValueError("there is nothing to take a percentile of")
    return sorted(values)[max(ceil(len(values) * percent / 100), 1) - 1]
