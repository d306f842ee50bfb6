"""What a host reads of its earlier life, whoever wrote it."""

import json
import uuid
from dataclasses import asdict, replace

import pytest

from sandfleet.fleet.host.state import Kept, StateFolder

KEPT = Kept("a" * 16, "acme", "ada", str(uuid.uuid4()), 3, "default", "handle", "secret", 12.5, 2)


def test_what_a_newer_version_has_noted_is_adopted_by_an_older_one(tmp_path):
    """Red when a field that is not known makes all of it unreadable: a host that is set back would lose every sandbox."""
    (tmp_path / "new.json").write_text(json.dumps({**asdict(KEPT), "of_tomorrow": [1]}))
    assert StateFolder(tmp_path).load() == [KEPT]


@pytest.mark.parametrize(
    "broken", [{"born_at": "noon"}, {"run_id": "no id"}, {"tenant": None}, {"attempt": []}]
)
def test_a_file_with_something_wrong_in_it_costs_its_own_sandbox_alone(tmp_path, broken):
    """Red when only the names of the fields are looked at: one that cannot be compared with the others keeps the host from
    starting, again and again."""
    state = StateFolder(tmp_path)
    state.save(KEPT)
    wrong = {**asdict(replace(KEPT, sandbox_id="b" * 16)), **broken}
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    assert state.load() == [KEPT]
    assert not (tmp_path / "wrong.json").exists()


def test_a_file_that_was_being_written_when_the_host_was_killed_does_not_stay(tmp_path):
    """Red when drafts are left: nobody else removes them while the host lives."""
    (tmp_path / "c.draft").write_text("{")
    assert StateFolder(tmp_path).load() == []
    assert not list(tmp_path.iterdir())
