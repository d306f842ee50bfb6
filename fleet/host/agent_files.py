"""The agent's modules as a folder that sandboxes see: sources for any Python, compiled ones for this Python's version.

An image with another Python leaves the compiled ones alone, by their names, and compiles the sources at each start.
"""

import os
import py_compile
import shutil
from pathlib import Path

from sandfleet.fleet import sandbox_agent

_SOURCE = Path(sandbox_agent.__file__).parent
_PACKAGE = "sandbox_agent"
_LAUNCHER = f"import sys\n\nfrom {_PACKAGE}.main import main\n\nmain(sys.argv[1:])\n"


class AgentFiles:
    """The folder, made once per host; sandboxes get links to its files, which share their place in memory."""

    def __init__(self, folder: Path, source: Path = _SOURCE) -> None:
        """Make ``folder`` from the modules in ``source``, in place of what is there."""
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        (folder / _PACKAGE).mkdir(parents=True)
        (folder / "__main__.py").write_text(_LAUNCHER)
        for module in source.glob("*.py"):
            (folder / _PACKAGE / module.name).write_bytes(module.read_bytes())
        for module in [*folder.rglob("*.py")]:
            # Never checked against the source: the host replaces both together.
            py_compile.compile(
                str(module), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # the sandbox has another user

    def place(self, target: Path) -> None:
        """Make the folder ``target`` with the agent in it."""
        shutil.copytree(self._folder, target, copy_function=os.link)
