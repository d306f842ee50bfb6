"""Fixtures of all tests. They are lazy: tests that ask for none of them start nothing."""

import hypothesis
import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a loaded machine is no fault of an example's
settings.load_profile("untimed")

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("loaded", deadline=None)
hypothesis.settings.load_profile("loaded")

pytest_plugins = [
    "tests.fixtures_servers",
    "tests.fixtures_engine",
    "tests.fixtures_stack",
    "tests.fixtures_leaks",
]


_OF_ONE_MACHINE = "tests/sandbox/"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process, which shares what its module starts, when several processes run tests.

    Those of sandbox hosts go all to one: the rules of the firewall, bridges and loop devices are the machine's.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            file = item.nodeid.partition("::")[0]
            group = _OF_ONE_MACHINE if file.startswith(_OF_ONE_MACHINE) else file
            item.add_marker(pytest.mark.xdist_group(group))
