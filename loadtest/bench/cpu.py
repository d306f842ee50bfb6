"""CPU time of processes and all their children, from /proc."""

from collections.abc import Mapping

import psutil


def cpu_ms(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU milliseconds (user and system) used so far by each named process and its descendants.

    Children that have ended count through their parent; a process that is gone counts 0. /proc counts in ticks of
    10 ms, so differences over many runs are exact enough and over single runs are not.
    """
    return {name: _tree_ms(pid) for name, pid in pids.items()}


def _tree_ms(pid: int) -> float:
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total_s = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s * 1000
