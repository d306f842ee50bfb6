"""AWS target tracking, as its documentation describes it: a metric per minute that is to be kept near a target.

Out after three minutes above it, in after fifteen below nine tenths of it, in proportion to those that are
alive, with pauses between. Without executors there is no metric, so it keeps one at least.
"""

import math
from collections.abc import Callable

from sandfleet.loadtest.simulate.world import Asked, View

_OUT_AFTER = 3
_IN_AFTER = 15
_IN_BELOW = 0.9


class TargetTracking:
    """Keeps ``metric`` near ``target``, between ``least`` and ``most`` executors."""

    every_s = 60.0

    def __init__(
        self,
        metric: Callable[[View], float],
        target: float,
        *,
        least: int,
        most: int,
        out_pause_s: float = 60.0,
        in_pause_s: float = 300.0,
    ) -> None:
        self._metric, self._target = metric, target
        self._least, self._most = max(1, least), most
        self._out_pause_s, self._in_pause_s = out_pause_s, in_pause_s
        self._above = self._below = 0
        self._changed_s = -math.inf

    def __call__(self, view: View) -> Asked:
        value = self._metric(view)
        self._above = self._above + 1 if value > self._target else 0
        self._below = self._below + 1 if value < self._target * _IN_BELOW else 0
        wanted = min(max(math.ceil(view.executors * value / self._target), self._least), self._most)
        since_s = view.at_s - self._changed_s
        if (wanted > view.desired and self._above >= _OUT_AFTER and since_s >= self._out_pause_s) or (
            wanted < view.desired and self._below >= _IN_AFTER and since_s >= self._in_pause_s
        ):
            self._changed_s = view.at_s
            return Asked(wanted)
        return Asked(min(max(view.desired, self._least), self._most))


def cpu(share_when_full: float) -> Callable[[View], float]:
    """Mean CPU use of the executors since the last look: runs wait for models most of the time, so that one with all slots
    taken uses ``share_when_full`` of its CPU."""
    return lambda view: view.busy_share * share_when_full


def backlog_per_task(view: View) -> float:
    """Runs, waiting and running, per executor that is alive: what SQS counts, since a permit is held while its run runs."""
    return (view.ready + view.busy) / max(1, view.executors)
