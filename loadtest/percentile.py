"""The percentile that all tables of measurements show."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank, of values in any order. Raises ValueError when there is none."""
    if not values:
        raise ValueError("there is nothing to take a percentile of")
    return sorted(values)[round((len(values) - 1) * percent / 100)]
