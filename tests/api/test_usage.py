"""What a user's runs have used of models: of one run, and in sums."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.api.conftest import Api

TODAY = datetime.now(UTC).date()


async def spend(
    api: Api,
    run: str,
    *,
    tenant: str = "acme",
    user: str = "alice",
    attempt: int = 1,
    model: str = "m",
    age: int = 0,
) -> None:
    """An attempt's account, by itself: one call for a dollar; model ``free`` has no price."""
    unpriced = model == "free"
    await api.sql(
        "insert into run_usage values (%s, %s, %s, %s, %s, %s, 1, 0, %s, 10, 5, 2, 1, %s)",
        *(
            tenant,
            user,
            UUID(run),
            attempt,
            model,
            TODAY - timedelta(age),
            int(unpriced),
            0 if unpriced else 1,
        ),
    )


async def begun(api: Api) -> tuple[str, str]:
    """Thread and id of a run of alice's that is over; no other usage is there."""
    await api.sql("truncate run_usage, daily_usage")
    async with api.client() as alice:
        thread = (await alice.threads.create())["thread_id"]
        made = await alice.runs.create(thread, "chat")
        await api.executor.finish(await api.executor.claim(made["run_id"]), 1)
    return thread, made["run_id"]


async def get(api: Api, path: str, key: str | None = None) -> Any:
    async with api.http(key) as http:
        return (await http.get(path)).raise_for_status().json()


async def test_a_run_tells_what_all_its_attempts_have_used(api: Api) -> None:
    """By model. Red when attempts are not added up, or what has no price passes for free."""
    thread, run = await begun(api)
    for attempt, model in ((1, "m"), (2, "m"), (2, "free")):
        await spend(api, run, attempt=attempt, model=model)
    for path in (f"/runs/{run}/timing", f"/threads/{thread}/runs/{run}/timing"):
        usage = (await get(api, path))["usage"]
        assert usage == {
            "calls": 3,
            "unmetered_calls": 0,
            "unpriced_calls": 1,
            "input_tokens": 30,
            "output_tokens": 15,
            "cache_read_tokens": 6,
            "cache_creation_tokens": 3,
            "cost_usd": 2.0,
            "models": usage["models"],
        }
        assert {name: (m["calls"], m["cost_usd"]) for name, m in usage["models"].items()} == {
            "m": (2, 2.0),
            "free": (1, None),
        }


async def test_a_run_without_a_model_has_used_nothing_and_an_old_one_says_so(api: Api) -> None:
    """Zeros for the one, null for the one whose events are forgotten. Red when these are taken for each other."""
    _, run = await begun(api)
    usage = (await get(api, f"/runs/{run}/timing"))["usage"]
    assert (usage["calls"], usage["cost_usd"], usage["models"]) == (0, 0, {})
    await api.sql("update runs set journal_expired = true where run_id = %s", UUID(run))
    assert (await get(api, f"/runs/{run}/timing"))["usage"] is None


async def test_usage_is_the_callers_and_nobody_elses(api: Api) -> None:
    """Red when another user's is in it, of the same tenant or of one with the user's name."""
    _, run = await begun(api)
    day = "insert into daily_usage values (%s, %s, %s, %s, 1, 0, 0, 10, 5, 2, 1, 1)"
    for tenant, user, model in (
        ("acme", "alice", "hers"),
        ("acme", "bob", "his"),
        ("globex", "alice", "another's"),
    ):
        await spend(api, run, tenant=tenant, user=user, model=model)
        await api.sql(day, tenant, TODAY, user, f"{model} before")
    for key, model in ((api.alice, "hers"), (api.bob, "his")):
        found = await get(api, "/usage?by=model", key)
        assert {row["model"] for row in found["usage"]} == {model, f"{model} before"}
        assert found["total"]["calls"] == 2


async def test_usage_stays_when_its_thread_or_run_is_deleted(api: Api) -> None:
    """What was spent is spent. Red when rows go with what they are of."""
    for what in ("run", "thread"):
        thread, run = await begun(api)
        await spend(api, run)
        async with api.client() as alice:
            if what == "run":
                await alice.runs.delete(thread, run)
            else:
                await alice.threads.delete(thread)
        assert (await get(api, "/usage"))["total"]["cost_usd"] == 1.0
        async with api.http() as http:
            assert (await http.get(f"/runs/{run}/timing")).status_code == 404


async def test_days_are_both_included_and_in_order(api: Api) -> None:
    """The last 30 unless they are named. Red when one of them is off by a day."""
    _, run = await begun(api)
    for age in (0, 29, 30):
        await spend(api, run, age=age, attempt=age)
    since, to = TODAY - timedelta(30), TODAY - timedelta(29)
    assert [row["day"] for row in (await get(api, "/usage"))["usage"]] == [str(to), str(TODAY)]
    named = await get(api, f"/usage?from={since}&to={to}&by=day")
    assert [row["day"] for row in named["usage"]] == [str(since), str(to)]
    assert (named["from"], named["to"], named["by"]) == (str(since), str(to), "day")


async def test_an_answer_is_bounded_and_its_total_is_not(api: Api) -> None:
    """Red when the limit is not held, or the total is only of what is shown."""
    _, run = await begun(api)
    for model in ("a", "b", "free"):
        await spend(api, run, model=model)
    async with api.http() as http:
        first = await http.get("/usage?by=model&limit=2")
        second = await http.get("/usage?by=model&limit=2&offset=2")
    assert [row["model"] for row in first.json()["usage"]] == ["a", "b"]
    assert first.headers["x-pagination-next"] == "2"
    assert [row["model"] for row in second.json()["usage"]] == ["free"]
    assert "x-pagination-next" not in second.headers
    assert first.json()["total"] == second.json()["total"]
    assert first.json()["total"]["calls"] == 3


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("from=yesterday", "from"),
        ("from=2026-02-30", "from"),
        ("from=20260101", "from"),
        ("to=2026-W01-1", "to"),
        ("to=%00", "to"),
        ("from=2026-01-02&to=2026-01-01", "from"),
        ("from=2020-01-01&to=2026-01-01", "from"),
        ("by=tenant", "by"),
        ("by=user", "by"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("offset=-1", "offset"),
    ],
)
async def test_a_wrong_query_is_refused_by_its_name(api: Api, query: str, field: str) -> None:
    """Red when it is ignored, or fails in the database."""
    async with api.http() as http:
        answer = await http.get(f"/usage?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"{field}:")


async def test_the_first_days_of_the_calendar_are_days(api: Api) -> None:
    """Red when the default of `from` is before the first day that there is."""
    assert (await get(api, "/usage?to=0001-01-05"))["from"] == "0001-01-01"
