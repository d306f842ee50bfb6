"""The cgroup freezer of a container, by its file: a write takes far less than a millisecond, a call to the engine 15."""

from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class Freezer:
    """The freezer of one container. Works for version 1 and 2 of cgroups."""

    def __init__(self, file: Path, frozen: str, thawed: str) -> None:
        self._file = file
        self._states = {True: frozen, False: thawed}

    @classmethod
    def of(cls, container_id: str, pid: int) -> "Freezer | None":
        """That of the container whose first process is ``pid``.

        None if it cannot be reached from here: the engine is on another machine or in another namespace, or this user
        may not write the file.
        """
        try:
            lines = (_PROC / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
        for file, states in (
            (_CGROUPS / f"freezer{paths.get('freezer', '')}" / "freezer.state", ("FROZEN", "THAWED")),
            (_CGROUPS / paths.get("", "").lstrip("/") / "cgroup.freeze", ("1", "0")),
        ):
            # The id in the path: a number alone may by now be another process, or be one of another namespace.
            if container_id in str(file) and file.is_file():
                freezer = cls(file, *states)
                return freezer if freezer.set(frozen=False) else None
        return None

    def set(self, *, frozen: bool) -> bool:
        """Freeze or thaw; false if that cannot be done from here."""
        try:
            self._file.write_text(self._states[frozen])
        except OSError:
            return False
        return True
