"""Looking for files: list, glob and grep. Each yields lines of JSON and returns what is to be said at the end.

They run in a process of their own (``worker.py``), which may be killed at any point.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re

from .describe import line, text
from .operation import Refused
from .paths import confined, open_regular, refusal
from .wire import MAX_ENTRIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from .operation import Json

_LINE_BYTES = 1024 * 1024  # of a line that grep looks at; what is longer counts as several
_SHOWN_BYTES = 500  # of a line that grep returns
_PROBE_BYTES = 8192  # a file with a NUL byte in these is no text, as git and grep have it


def list_directory(spec: Json) -> Generator[bytes, None, Json]:
    """Entries of one directory, by name."""
    path = confined(spec["path"])
    try:
        with os.scandir(path) as found:
            entries = [entry for entry, _ in zip(found, range(MAX_ENTRIES + 1))]  # noqa: B905 - Python 3.9
    except OSError as error:
        raise refusal(error, spec["path"]) from None
    for entry in sorted(entries[:MAX_ENTRIES], key=lambda entry: entry.name):
        yield line(entry.name, entry)
    return {"truncated": len(entries) > MAX_ENTRIES, "timed_out": False}


def glob(spec: Json) -> Generator[bytes, None, Json]:
    """Entries below a directory whose path, relative to it, fits a pattern; ``*`` stays in one name, ``**`` does not."""
    path = confined(spec["path"])
    fits = _matcher(spec["pattern"])
    most = min(int(spec["most"]), MAX_ENTRIES)
    for found, (name, entry) in enumerate(item for item in _below(path, spec["path"]) if fits(item[0])):
        if found == most:
            return {"truncated": True, "timed_out": False}
        yield line(name, entry)
    return {"truncated": False, "timed_out": False}


def grep(spec: Json) -> Generator[bytes, None, Json]:
    """Lines that a regular expression finds, in a file or in all text files below a directory."""
    path = confined(spec["path"])
    pattern = str(spec["pattern"])
    fits = None if spec.get("glob") is None else _matcher(spec["glob"])
    most = min(int(spec["most"]), MAX_ENTRIES)
    try:
        source = re.escape(pattern) if spec.get("fixed") else pattern
        wanted = re.compile(
            source.encode("utf-8", "surrogateescape"), re.IGNORECASE if spec.get("ignore_case") else 0
        )
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise Refused("bad_pattern", f"the pattern is no regular expression: {error}") from None
    found = 0
    for name, file in _files(path, spec["path"], fits):
        for number, content in _lines(file):
            if wanted.search(content):
                if found == most:
                    return {"truncated": True, "timed_out": False}
                found += 1
                shown = content[:_SHOWN_BYTES].decode("utf-8", "replace")
                yield json.dumps({"name": text(name), "line": number, "text": shown}).encode() + b"\n"
    return {"truncated": False, "timed_out": False}


def _matcher(pattern: str) -> Callable[[str], object]:
    """Whether a relative path fits a pattern of ``*``, ``?``, ``[...]`` and ``**``; one without ``/`` fits any name.

    Raises Refused for a pattern that cannot be.
    """
    pattern = str(pattern).lstrip("/")
    if not pattern:
        raise Refused("bad_pattern", "the pattern is empty")
    if "/" not in pattern and pattern != "**":
        pattern = f"**/{pattern}" if "**" not in pattern else pattern
    parts = []
    for part in re.sub(r"(\*\*/)+", "**/", pattern).split("/"):
        if part == "**":
            parts.append("(?:[^/]+/)*")
        else:
            parts.append(_part(part) + "/")
    source = "".join(parts)
    source = source[:-1] if source.endswith("/") else source[: -len("(?:[^/]+/)*")] + ".*"
    try:
        return re.compile(source, re.DOTALL).fullmatch
    except (re.error, RecursionError, OverflowError) as error:
        raise Refused("bad_pattern", f"the pattern is none: {error}") from None


def _part(pattern: str) -> str:
    """One name of a pattern as a regular expression."""
    source, at = "", 0
    while at < len(pattern):
        character = pattern[at]
        end = pattern.find("]", at + 2 + pattern.startswith("[!", at)) if character == "[" else -1
        if character == "*":
            source += "[^/]*" if not source.endswith("[^/]*") else ""
        elif character == "?":
            source += "[^/]"
        elif end > 0:
            inner = re.sub(r"([\\\[&~|^])", r"\\\1", pattern[at + 1 : end])
            source += f"[^/{inner[1:]}]" if inner.startswith("!") else f"(?!/)[{inner}]"
            at = end
        else:
            source += re.escape(character)
        at += 1
    return source


def _files(path: str, shown: str, fits: Callable[[str], object] | None) -> Iterator[tuple[str, str]]:
    """Regular files to look into, as the name to show and the path: of a file itself its own."""
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise Refused("not_found", f"{shown}: No such file or directory")
        yield os.path.basename(path), path
        return
    for name, entry in _below(path, shown):
        with contextlib.suppress(OSError):
            if entry.is_file(follow_symlinks=False) and (fits is None or fits(name)):
                yield name, entry.path


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Lines of a text file with their numbers, from 1; none of a file that is no text or cannot be read."""
    try:
        fd = open_regular(path, os.O_RDONLY)
    except Refused:
        return
    with open(fd, "rb") as file:
        try:
            if b"\0" in file.read(_PROBE_BYTES):
                return
            file.seek(0)
            for number in itertools.count(1):
                content = file.readline(_LINE_BYTES)
                if not content:
                    return
                yield number, content.rstrip(b"\r\n")
        except OSError:
            return


def _below(path: str, shown: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a directory with its relative path, by name, links not followed; what cannot be read is left out."""
    try:
        waiting = [iter(_sorted(path))]
    except OSError as error:
        raise refusal(error, shown) from None
    prefixes = [""]
    while waiting:
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
            prefixes.pop()
            continue
        name = prefixes[-1] + entry.name
        yield name, entry
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(iter(_sorted(entry.path)))
                prefixes.append(name + "/")


def _sorted(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as found:
        return sorted(found, key=lambda entry: entry.name)
