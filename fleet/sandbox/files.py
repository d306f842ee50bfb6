"""Finding and rearranging files in a run's sandbox. Paths lie under /workspace or /tmp; relative ones in /workspace."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sandfleet.fleet.sandbox.client import SandboxClient

T = TypeVar("T")


class Use(Protocol):
    """Calls something with the client of the run's host and a token for its sandbox, which is made if need be."""

    async def __call__(self, call: Callable[[SandboxClient, str], Awaitable[T]]) -> T: ...


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found, with whether there is more and whether its time ran out.

    Entries have ``name`` (relative to where the search began), ``kind`` (file, directory, symlink or other), ``size``
    in bytes, ``mode`` and ``modified_s``; matches have ``name``, ``line`` (from 1) and ``text`` (its first 500 bytes).
    """

    items: list[dict[str, Any]]
    truncated: bool
    timed_out: bool


class SandboxFiles:
    """All methods raise SandboxError, with the codes of ``docs/sandbox-protocol.md``."""

    def __init__(self, use: Use) -> None:
        self._use = use

    async def stat(self, path: str) -> dict[str, Any]:
        """``kind``, ``size``, ``mode`` and ``modified_s`` of what a path leads to; ``not_found`` if there is nothing."""
        return await self._use(
            lambda client, token: client.call("GET", "/sandbox/stat", token, params={"path": path})
        )

    async def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, which is made with its directories if need be."""
        await self._use(lambda client, token: client.write(token, path, data, None, append=True))

    async def glob(
        self, pattern: str, path: str = "/workspace", *, limit: int = 1000, timeout_s: float = 10
    ) -> Found:
        """Entries below ``path`` that fit a pattern.

        ``*`` and ``?`` stay in one name and ``**`` goes through directories; a pattern without ``/`` fits in any.
        """
        asked = {"path": path, "pattern": pattern, "limit": limit, "timeout_s": timeout_s}
        return await self._search("glob", "entries", asked)

    async def grep(
        self,
        pattern: str,
        path: str = "/workspace",
        *,
        glob: str | None = None,
        fixed: bool = False,
        ignore_case: bool = False,
        limit: int = 1000,
        timeout_s: float = 10,
    ) -> Found:
        """Lines that a regular expression finds (or a text, if ``fixed``) in a file or the text files below ``path``."""
        asked = {
            "path": path, "pattern": pattern, "glob": glob, "fixed": fixed, "ignore_case": ignore_case,
            "limit": limit, "timeout_s": timeout_s,
        }  # fmt: skip
        return await self._search("grep", "matches", asked)

    async def make_directory(self, path: str) -> None:
        """A directory with those above it; one that exists is fine."""
        await self._change("mkdir", {"path": path})

    async def move(self, path: str, to: str, *, replace: bool = False) -> None:
        """A file, link or directory to another path; over a file there only if ``replace``."""
        await self._change("move", {"path": path, "to": to, "replace": replace})

    async def copy(self, path: str, to: str, *, replace: bool = False) -> None:
        """A file, or a directory with all below it; links stay links."""
        await self._change("copy", {"path": path, "to": to, "replace": replace})

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """A file, a link itself, or a directory, which must be empty unless ``recursive``."""
        params: dict[str, str | int] = {"path": path, "recursive": int(recursive)}
        await self._use(lambda client, token: client.call("DELETE", "/sandbox/file", token, params=params))

    async def _search(self, what: str, items: str, asked: dict[str, Any]) -> Found:
        found = await self._use(
            lambda client, token: client.call("POST", f"/sandbox/{what}", token, json=asked)
        )
        return Found(found[items], found["truncated"], found["timed_out"])

    async def _change(self, what: str, asked: dict[str, Any]) -> None:
        await self._use(lambda client, token: client.call("POST", f"/sandbox/{what}", token, json=asked))
