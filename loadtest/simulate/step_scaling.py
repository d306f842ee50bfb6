"""AWS step scaling by how long the first run has waited, for an executor or for a sandbox's room, a metric per minute: out by steps, in one by one."""

import math

from sandfleet.loadtest.simulate.world import Asked, View


class StepScaling:
    """Out at once from ``age_s`` on by the steps ((from, more), …) in seconds beyond it; in by one after ``in_after`` minutes
    with more free slots than an executor has. Executors beyond what was asked for take nothing more, until they are idle."""

    every_s = 60.0

    def __init__(
        self,
        age_s: float,
        steps: tuple[tuple[float, int], ...],
        *,
        slots: int,
        least: int,
        most: int,
        in_after: int = 10,
        out_pause_s: float = 60.0,
        in_pause_s: float = 300.0,
    ) -> None:
        self._age_s, self._steps, self._slots = age_s, steps, slots
        self._least, self._most = least, most
        self._in_after, self._out_pause_s, self._in_pause_s = in_after, out_pause_s, in_pause_s
        self._roomy = 0
        self._changed_s = -math.inf

    def __call__(self, view: View) -> Asked:
        self._roomy = self._roomy + 1 if view.free > self._slots else 0
        wait_s = max(view.oldest_s, view.room_wait_s)
        since_s = view.at_s - self._changed_s
        change = 0
        if wait_s >= self._age_s and since_s >= self._out_pause_s:
            change = max(more for beyond_s, more in self._steps if wait_s >= self._age_s + beyond_s)
        elif self._roomy >= self._in_after and since_s >= self._in_pause_s:
            change = -1
        desired = min(max(view.desired + change, self._least), self._most)
        if desired != view.desired:
            self._changed_s = view.at_s
        return Asked(desired, view.executors - desired)
