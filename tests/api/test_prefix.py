"""Behind a front that puts something before each path, as API Gateway's private integrations do with their stage."""

import httpx
import pytest

from sandfleet.functions.api.app import create_app
from sandfleet.functions.api.prefix import without_prefix
from tests.api.conftest import Api, make_settings, serve


async def test_paths_come_with_the_prefix_and_health_checks_without(api: Api) -> None:
    """Keys are asked for below it, too. Red when it is taken off after something has looked at the path."""
    app = create_app(make_settings(api.database_url, api.redis_url, api_prefix="/v1"))
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        assert (await http.get("/ok")).json() == {"ok": True}
        assert (await http.get("/v1/ok")).json() == {"ok": True}
        assert (await http.post("/v1/threads", json={})).status_code == 401
        http.headers["x-api-key"] = api.alice
        assert (await http.post("/v1/threads", json={})).status_code == 200
        made = (await http.post("/v1/runs", json={"assistant_id": "chat"})).json()
        async with http.stream("GET", f"/v1/runs/{made['run_id']}/stream") as stream:
            assert stream.status_code == 200
        assert (await http.get("/v1/v1/ok")).status_code == 404


async def test_nothing_is_taken_off_unless_it_is_said(api: Api) -> None:
    async with api.http() as http:
        assert (await http.get("/v1/ok")).status_code == 404


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/v1/ok", "/ok"),
        ("/v1", "/"),
        ("/v1/", "/"),
        ("/v10/ok", "/v10/ok"),
        ("/ok", "/ok"),
        ("/a/v1/ok", "/a/v1/ok"),
    ],
)
def test_only_a_whole_part_at_the_front_is_the_prefix(path: str, rest: str) -> None:
    assert without_prefix(path, "/v1") == rest
