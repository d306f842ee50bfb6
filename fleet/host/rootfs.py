"""A root file system made of this machine's own programs: the running Python, bash and the usual tools."""

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from sandfleet.shared.errors import SandfleetError

REQUIRED = frozenset(["bash", "sh", "ls", "cat", "cp", "mv", "rm", "mkdir", "grep", "sed", "find", "sleep"])
_NAMES = (
    # coreutils
    "base64 basename cat chmod comm cp cut date dd df dirname du echo env expand expr false fmt fold head id join "
    "ln ls md5sum mkdir mkfifo mktemp mv nice nl nohup nproc numfmt od paste pathchk pr printenv printf pwd readlink "
    "realpath rm rmdir seq sha1sum sha256sum sha512sum shuf sleep sort split stat stdbuf stty sum sync tac tail tee "
    "test timeout touch tr true truncate tsort tty uname unexpand uniq unlink wc whoami yes [ "
    # shells, text, files, processes
    "bash sh grep egrep fgrep sed awk find xargs diff cmp patch tar gzip gunzip zcat bzip2 xz unzip zip which "
    "ps kill pgrep pkill free getopt setsid hexdump xxd jq tree git make"
)
PROGRAMS = tuple(_NAMES.split())
_SEARCH_PATH = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"
_EXTRA_TREES = ("/usr/share/git-core/templates", "/usr/share/zoneinfo/UTC")
_SKIPPED = frozenset(
    [
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "turtledemo",
        "tkinter",
        "ensurepip",
        "lib2to3",
        "pydoc_data",
    ]
)
_DIRECTORIES = {
    "dev": 0o755, "etc": 0o755, "proc": 0o555, "run": 0o755, "run/sandfleet": 0o755, "sys": 0o555,
    "tmp": 0o1777, "usr": 0o755, "usr/bin": 0o755, "usr/sbin": 0o755, "usr/lib": 0o755, "usr/lib64": 0o755,
    "usr/local": 0o755, "usr/local/bin": 0o755, "var": 0o755, "workspace": 0o1777, "root": 0o700,
}  # fmt: skip
_LINKS = {
    "bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "var/tmp": "../tmp",
}  # fmt: skip
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nsandbox:x:65532:65532:sandbox:/workspace:/bin/bash\n",
    "etc/group": "root:x:0:\nsandbox:x:65532:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}


def write_archive(target: IO[bytes]) -> None:
    """Write the file system to ``target`` as an uncompressed tar; SandfleetError if a needed program is missing."""
    programs = {name: found for name in PROGRAMS if (found := shutil.which(name, path=_SEARCH_PATH))}
    if missing := sorted(REQUIRED - programs.keys()):
        raise SandfleetError(
            f"Cannot assemble a sandbox image: {', '.join(missing)} not found on this machine. Install them, or "
            "build on an image with --from."
        )
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    content: dict[str, str] = {f"usr/bin/{name}": os.path.realpath(path) for name, path in programs.items()}
    content.update(_python(interpreter))
    for tree in _EXTRA_TREES:
        content.update({path.lstrip("/"): path for path in _walk(tree)})
    binaries = {path for path in content.values() if _is_elf(path)}
    content.update(_libraries(binaries))
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, mode in _DIRECTORIES.items():
            _add(archive, name, tarfile.DIRTYPE, mode)
        for name, link in {**_LINKS, **_python_links(interpreter)}.items():
            _add(archive, name, tarfile.SYMTYPE, 0o777, link=link)
        for name, text in _FILES.items():
            _add(archive, name, tarfile.REGTYPE, 0o644, data=text.encode())
        for name, source in sorted(content.items()):
            with open(source, "rb") as file:
                info = archive.gettarinfo(arcname=name, fileobj=file)
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", os.fstat(file.fileno()).st_size
                info.mode = 0o755 if info.mode & 0o111 else 0o644
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                archive.addfile(info, file)


def _python(interpreter: str) -> dict[str, str]:
    """The interpreter and its standard library, moved to /usr/local: it finds its library beside itself."""
    content = {f"usr/local/bin/{os.path.basename(interpreter)}": interpreter}
    prefix = os.path.realpath(sys.base_prefix)
    for tree in {os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib")}:
        for path in _walk(tree):
            content[f"usr/local/{os.path.relpath(path, prefix)}"] = path
    return content


def _python_links(interpreter: str) -> dict[str, str]:
    binary = os.path.basename(interpreter)
    names = {"python3", "python"} - {binary}
    links = {f"usr/local/bin/{name}": binary for name in names}
    return {**links, **{f"usr/bin/{name}": f"../local/bin/{binary}" for name in names}}


def _walk(root: str) -> Iterator[str]:
    if os.path.isfile(root):
        yield root
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith("config-")]
        for name in files:
            optimised = name.endswith((".opt-1.pyc", ".opt-2.pyc"))
            path = os.path.join(folder, name)
            if not optimised and not name.endswith((".a", ".exe")) and os.path.isfile(path):
                yield path


def _is_elf(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _libraries(binaries: Iterable[str]) -> dict[str, str]:
    """The shared libraries that these load, where the loader looks for them without a cache of its own."""
    # ldd asks the loader; it answers a non-zero status when one of many files is static.
    listing = subprocess.run(["ldd", *sorted(binaries)], capture_output=True, text=True, check=False).stdout
    paths = set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", listing, re.MULTILINE))
    libc = next(
        (path for path in sorted(paths) if re.search(r"/(libc\.so|ld-musl)", path)), "/usr/lib/libc.so"
    )
    content: dict[str, str] = {}
    for path in paths:
        place = path.removeprefix("/usr")
        if not re.match(r"/lib(64|32)?/", place):
            place = f"{os.path.dirname(libc.removeprefix('/usr'))}/{os.path.basename(path)}"
        content[f"usr{place}"] = os.path.realpath(path)
    return content


def _add(
    archive: tarfile.TarFile, name: str, kind: bytes, mode: int, *, link: str = "", data: bytes = b""
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.size = kind, mode, link, len(data)
    archive.addfile(info, io.BytesIO(data) if data else None)


def recipe() -> bytes:
    """The text of this recipe, which names what it makes."""
    return Path(__file__).read_bytes()
