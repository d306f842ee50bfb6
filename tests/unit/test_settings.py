"""Settings that must fit each other."""

import pytest
from pydantic import ValidationError

from sandfleet.shared.settings import Settings


@pytest.mark.parametrize("name", ["renew_every_s", "sweep_every_s"])
def test_what_must_happen_often_within_a_lease_is_held_to_it(name: str) -> None:
    """Red without the check: leases would never expire, or always. The message says what to change."""
    with pytest.raises(ValidationError, match=f"SANDFLEET_{name.upper()} is 3 and must be at most a third"):
        Settings(lease_s=8.9, **{"renew_every_s": 1.0, name: 3.0})  # type: ignore[arg-type]
    assert Settings(lease_s=9.0, **{"renew_every_s": 1.0, name: 3.0}).lease_s == 9.0  # type: ignore[arg-type]
