"""What a sandbox host takes at once."""

from sandfleet.fleet.host.capacity import Capacity
from sandfleet.shared.templates import Template

_MIB = 2**20


def template(**more: object) -> Template:
    """One of 256 MiB and 64 processes."""
    fields = {
        "name": "some", "image": "some", "network": "none", "memory": 256 * _MIB, "cpus": 1.0, "pids": 64,
        "workspace": 64 * _MIB, "output": _MIB, "command_timeout_s": 60, "lifetime_s": 600,
    }  # fmt: skip
    return Template.model_validate({**fields, **more})


def test_the_workspaces_on_disk_have_a_sum() -> None:
    """Only those on disk count for it. Red when it is not among what bounds the room."""
    host = Capacity(memory=100 * 256 * _MIB, pids=100 * 64, sandboxes=100, disk=1000 * _MIB)
    on_disk = template(workspace_on="disk", workspace=300 * _MIB)
    in_memory = template()
    assert host.room(Capacity.of([]), on_disk) == 3
    taken = Capacity.of([on_disk, on_disk, in_memory])
    assert (taken.disk, host.room(taken, on_disk)) == (600 * _MIB, 1)
    assert host.room(Capacity.of([on_disk] * 3), on_disk) == 0
    assert host.room(Capacity.of([on_disk] * 3), in_memory) == 97
