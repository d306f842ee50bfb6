"""Which hosts of a group the scaler protects, and which it gives free. No emulator knows the call."""

import pytest

from sandfleet.functions.scaler.fleet import to_turn


def instance(name: str, protected: bool, state: str = "InService") -> dict[str, object]:
    return {"InstanceId": name, "ProtectedFromScaleIn": protected, "LifecycleState": state}


GROUP = [
    instance("busy", False),
    instance("busy-protected", True),
    instance("idle", False),
    instance("idle-protected", True),
]
BUSY = {"busy", "busy-protected", "of-another-group"}


def test_busy_hosts_are_protected_and_idle_ones_given_free() -> None:
    """Red when a host with runs could be taken, when one stays for ever, or when calls are made that change nothing."""
    assert to_turn(GROUP, BUSY, protect=True) == ["busy"]
    assert to_turn(GROUP, BUSY, protect=False) == ["idle-protected"]


@pytest.mark.parametrize("state", ["Pending", "Pending:Wait", "Terminating:Wait", "Terminated", "Standby"])
def test_one_that_is_not_in_service_is_not_named(state: str) -> None:
    """Red when it is: AWS refuses the whole call, and busy hosts stay unprotected."""
    assert to_turn([instance("busy", False, state)], BUSY, protect=True) == []
    assert to_turn([instance("new", True, state)], BUSY, protect=False) == []
