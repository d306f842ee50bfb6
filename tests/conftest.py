"""Fixtures of all tests. They are lazy: tests that ask for none of them start nothing."""

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# How long an example takes, or making one, says how busy the machine is.
hypothesis.settings.register_profile(
    "loaded", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("loaded")

pytest_plugins = [
    "tests.fixtures_servers",
    "tests.fixtures_emulators",
    "tests.fixtures_engine",
    "tests.fixtures_stack",
    "tests.fixtures_leaks",
]


# In one process each: what they share is a session's, or, as rules of the firewall and loop devices, the machine's.
_TOGETHER = ("tests/sandbox/", "tests/sandboxes/", "tests/infra/", "tests/observability/")


class ByFile(LoadScopeScheduling):
    """Keeps the tests of a file in one process, which shares what its module starts, and those of some folders."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """How tests are given to the processes of ``pytest -n``."""
    return ByFile(config, log)
