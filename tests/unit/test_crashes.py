"""What a host says of the machine's way with crashes."""

import pytest

from sandfleet.fleet.host import crashes


@pytest.mark.parametrize(
    ("pattern", "leave"),
    [
        ("|/usr/lib/systemd/systemd-coredump %P %u\n", True),
        ("@/run/coredump.socket\n", True),
        ("core\n", False),
        ("", False),
    ],
)
def test_crashes_leave_a_sandbox_by_a_program_or_a_socket(tmp_path, pattern, leave):
    """Red when one of the two is not known: its limit for core dumps, 0, does not keep a sandbox from either."""
    file = tmp_path / "core_pattern"
    file.write_text(pattern)
    assert crashes.leave_the_sandbox(file) is leave


def test_a_kernel_that_does_not_tell_passes(tmp_path):
    assert crashes.leave_the_sandbox(tmp_path / "none") is False
