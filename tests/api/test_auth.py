"""Who may ask."""

import httpx
import pytest
from fastapi import FastAPI

from sandfleet.functions.api import auth
from tests.api.conftest import Api


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": "sf_wrong"},
        {"authorization": "Bearer sf_wrong"},
        {"authorization": "Basic abc"},
        {"x-api-key": "\xff\x00"},
    ],
)
async def test_without_a_good_key_there_is_401(api: Api, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        encoded = [(k.encode(), v.encode("latin-1").replace(b"\0", b"")) for k, v in headers.items()]
        answer = await http.post("/threads", json={}, headers=encoded)
    assert answer.status_code == 401
    assert isinstance(answer.json()["detail"], str)


async def test_a_key_comes_as_header_or_as_bearer_token(api: Api) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        for headers in ({"x-api-key": api.alice}, {"authorization": f"bearer {api.alice}"}):
            assert (await http.post("/threads", json={}, headers=headers)).status_code == 200


def _routes(app: FastAPI) -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]


async def test_every_route_but_the_public_ones_asks_for_a_key(api: Api) -> None:
    """Breaks when a path is added to the public ones or served beside the middleware."""
    public = {"/ok", "/info", "/system/ready"}
    routes = _routes(api.app)
    assert len(routes) > 40
    async with httpx.AsyncClient(base_url=api.url) as http:
        for method, path in routes:
            status = (await http.request(method, path)).status_code
            assert (status == 401) == (path not in public), (method, path, status)


async def test_a_revoked_key_is_refused_once_the_memory_of_it_is_over(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_KEEP_S", 0.0)
    async with api.http(api.eve) as http:
        assert (await http.post("/threads", json={})).status_code == 200
        await api.sql("update api_keys set revoked_at = now() where user_id = 'eve'")
        try:
            assert (await http.post("/threads", json={})).status_code == 401
        finally:
            await api.sql("update api_keys set revoked_at = null where user_id = 'eve'")


async def test_browsers_of_other_origins_may_ask(api: Api) -> None:
    """The preflight carries no key; the answer lets scripts see where to reconnect."""
    async with httpx.AsyncClient(base_url=api.url) as http:
        preflight = await http.options(
            "/threads",
            headers={
                "origin": "https://chat.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": "x-api-key",
            },
        )
        answer = await http.post(
            "/threads", json={}, headers={"origin": "https://chat.example", "x-api-key": api.alice}
        )
    assert preflight.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "content-location" in answer.headers["access-control-expose-headers"].lower()


async def test_what_needs_no_key_answers(api: Api) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        assert (await http.get("/ok")).json() == {"ok": True}
        assert (await http.get("/info")).json()["version"]
        assert "swagger" in (await http.get("/docs")).text
        document = (await http.get("/openapi.json")).json()
    assert "RunBody" in document["components"]["schemas"]


async def test_ready_says_what_is_missing(api: Api) -> None:
    async with httpx.AsyncClient(base_url=api.url) as http:
        await api.sql("delete from executors")
        answer = await http.get("/system/ready")
        assert (answer.status_code, answer.json()["missing"]) == (503, ["no executor is alive"])
        await api.sql("insert into executors (executor_id, pool, slots, busy) values ('e', 'default', 1, 0)")
        assert (await http.get("/system/ready")).status_code == 200
        await api.sql("update executors set heartbeat_at = clock_timestamp() - interval '11 s'")
        assert (await http.get("/system/ready")).status_code == 503


@pytest.mark.parametrize("path", ["/nothing", "/threads/x/stream", "/store/items", "/runs/crons/search"])
async def test_an_unknown_route_is_404(api: Api, http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={})
    assert answer.status_code == 404
    assert isinstance(answer.json()["detail"], str)


async def test_a_wrong_method_is_405(http: httpx.AsyncClient) -> None:
    assert (await http.put("/threads")).status_code == 405
