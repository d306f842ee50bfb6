"""`dev.json` is for other programs of this user, and for nobody else."""

import stat
from pathlib import Path

import pytest

from sandfleet.localstack import dev_file
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.process import LocalStackError

INFO = StackInfo(
    "http://a", "key", "postgresql://b", "redis://c", "http://d", {"default": "e"}, "f", "g", "h", "bwrap"
)


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    """It holds the API key. Breaks if it is written with the usual mode."""
    dev_file.write(tmp_path / "dev.json", INFO)
    assert stat.S_IMODE((tmp_path / "dev.json").stat().st_mode) == 0o600
    assert dev_file.read(tmp_path / "dev.json") == INFO


def test_without_a_stack_it_says_what_to_do(tmp_path: Path) -> None:
    """Breaks if the missing file shows as an error of the operating system."""
    with pytest.raises(LocalStackError, match="sandfleet dev"):
        dev_file.read(tmp_path / "dev.json")
