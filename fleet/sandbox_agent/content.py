"""Content of files: READ and WRITE."""

from __future__ import annotations

import contextlib
import os
import stat

from . import wire
from .operation import Operation, Refused
from .paths import confined, open_regular, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent
    from .operation import Json

# Chunks that one operation reads before others have their turn.
_CHUNKS_AT_ONCE = 4


class ReadFile(Operation):
    """Content of one regular file, from an offset, at most ``limit`` bytes."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        offset, self.left = int(spec.get("offset", 0)), int(spec["limit"])
        self.fd = open_regular(confined(spec["path"]), os.O_RDONLY)
        try:
            self.size = os.fstat(self.fd).st_size
            os.lseek(self.fd, offset, os.SEEK_SET)
        except (OSError, OverflowError) as error:
            os.close(self.fd)
            raise Refused("io_error", str(error)) from None

    def tick(self, now: float) -> float | None:
        try:
            for _ in range(_CHUNKS_AT_ONCE):
                if self.credit <= 0:
                    return None
                data = os.read(self.fd, max(0, min(wire.CHUNK, self.credit, self.left)))
                if not data:
                    os.close(self.fd)
                    self.done({"size": self.size})
                    return None
                self.left -= len(data)
                self.send(wire.DATA, data)
        except OSError as error:
            os.close(self.fd)
            self.refuse("io_error", str(error))
            return None
        return now

    def kill(self) -> None:
        os.close(self.fd)
        super().kill()


class WriteFile(Operation):
    """A file replaced as a whole, written beside the target and renamed at the end; or one that is appended to."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.target = confined(spec["path"])
        self.size = 0
        self.fd = -1
        mode = None if spec.get("mode") is None else int(spec["mode"]) & 0o777
        if os.path.isdir(self.target):
            raise Refused("is_a_directory", f"{spec['path']} is a directory")
        try:
            os.makedirs(os.path.dirname(self.target), exist_ok=True)
            if spec.get("append"):
                self.part = None
                self.fd = open_regular(self.target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            else:
                folder, name = os.path.split(self.target)
                self.part = os.path.join(folder, f"{name[:40]}.{os.urandom(6).hex()}.part")
                self.fd = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                if mode is None:
                    with contextlib.suppress(FileNotFoundError):
                        mode = stat.S_IMODE(os.stat(self.target).st_mode)
            if mode is not None:
                os.fchmod(self.fd, mode)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            if self.fd >= 0:
                os.close(self.fd)
            raise refusal(
                error if isinstance(error, OSError) else OSError(str(error)), spec["path"]
            ) from None

    def data(self, body: bytes) -> None:
        view = memoryview(body)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            self._fail(error)
            return
        self.size += len(body)
        self.grant(len(body))

    def eof(self) -> None:
        try:
            if self.part is not None:
                os.replace(self.part, self.target)
        except OSError as error:
            self._fail(error)
            return
        os.close(self.fd)
        self.done({"size": self.size})

    def kill(self) -> None:
        self._drop()
        super().kill()

    def _fail(self, error: OSError) -> None:
        self._drop()
        refused = refusal(error, self.target)
        self.refuse(refused.code, refused.message)

    def _drop(self) -> None:
        os.close(self.fd)
        if self.part is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.part)
