"""Fixtures of all tests. They are lazy: tests that ask for none of them start nothing."""

pytest_plugins = ["tests.fixtures_servers", "tests.fixtures_stack", "tests.fixtures_leaks"]
