"""What of a file a sandbox's host is asked for."""

from starlette.requests import Request

from sandfleet.functions.api.routes.sandbox_files import wanted_part


def asked(query: str) -> dict[str, str | int]:
    return wanted_part(Request({"type": "http", "query_string": query.encode(), "headers": []}))


def test_a_host_is_told_of_no_limit_that_nobody_has_set() -> None:
    """Red when all is asked for by a number: a host of the version before, which takes 1 GiB at most, would refuse every
    download while hosts are replaced."""
    assert asked("path=file") == {"path": "file", "offset": 0}
    assert asked("path=file&offset=3&limit=5") == {"path": "file", "offset": 3, "limit": 5}
    assert asked("path=file&limit=0")["limit"] == 0
