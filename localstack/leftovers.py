"""What a local stack owns outside its own memory is recorded, so that any successor can clean up after it.

Three traces lead to everything: the recorded process ids with their start times, the variable
``SANDFLEET_INSTANCE`` in the environment of every descendant, and the label ``sandfleet.instance`` of
containers and networks.
"""

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sandfleet.localstack import docker_api

INSTANCE_VARIABLE = "SANDFLEET_INSTANCE"
LABEL = "sandfleet.instance"
_GRACE_S = 5.0


@dataclass
class Record:
    """The processes (name, pid, start time) of one instance and the engine that its containers are on."""

    instance: str
    docker_host: str | None = None
    processes: list[tuple[str, int, float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the record in one step: a reader sees the old one or the new one."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(vars(self)))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Record | None":
        """The record at ``path``; None if there is none or it cannot be read."""
        try:
            data = json.loads(path.read_text())
            return cls(data["instance"], data["docker_host"], [tuple(p) for p in data["processes"]])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def processes_of(instance: str, record: Record | None = None) -> list[psutil.Process]:
    """All live processes of an instance but this one: recorded, or carrying its id in their environment."""
    recorded = {(pid, start) for _, pid, start in record.processes} if record else set()
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if (process.pid, process.create_time()) in recorded or process.environ().get(
                INSTANCE_VARIABLE
            ) == instance:
                found.append(process)
    return found


def clear(
    path: Path, instance: str, docker_host: str | None = None, spare: frozenset[int] = frozenset()
) -> list[str]:
    """End what is left of an instance and return what was removed, in words.

    ``path`` is where its record is, ``docker_host`` an engine to look at beside the recorded one, and ``spare``
    holds process ids to leave alone. Containers go first: while the engine of a dead stack is still up.
    """
    record = Record.load(path)
    removed: list[str] = []
    for host in {docker_host, record.docker_host if record else None} - {None}:
        assert host is not None
        removed += docker_api.remove_labelled(host, f"{LABEL}={instance}")
    left = [p for p in processes_of(instance, record) if p.pid not in spare]
    names = {pid: name for name, pid, _ in record.processes} if record else {}
    for process in left:
        with suppress(psutil.Error):
            removed.append(f"process {names.get(process.pid) or process.name()} ({process.pid})")
            process.send_signal(signal.SIGCONT)
            # PostgreSQL takes SIGINT for a fast stop; SIGTERM would wait for its clients.
            process.send_signal(signal.SIGINT if names.get(process.pid) == "postgres" else signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [p for p in processes_of(instance, record) if p.pid not in spare]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=_GRACE_S)
    path.unlink(missing_ok=True)
    return removed
