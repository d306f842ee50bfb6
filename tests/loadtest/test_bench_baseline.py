"""The baseline, started on real servers and put under the benchmark's load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from redis.asyncio import Redis

from sandfleet.loadtest.bench.baseline import start as baseline
from sandfleet.loadtest.bench.loop import Loop
from tests.fixtures_servers import TestServers
from tests.loadtest.served import Served

AGENT = Path(__file__).parents[2] / "examples" / "hello.py:graph"


def _options(servers: TestServers, redis_url: str, served: Served, folder: Path) -> Mapping[str, Any]:
    return {
        "database_url": servers.admin_url,
        "redis_url": redis_url,
        "redis_db": int(redis_url.rsplit("/", 1)[1]),
        "provider_url": f"{served.url}/v1",
        "agent": AGENT,
        "shared_pids": {},
        "folder": folder,
    }


async def test_the_baseline_runs_the_agent_streams_it_and_leaves_nothing(
    servers: TestServers, redis_url: str, served: Served, tmp_path: Path
) -> None:
    async with baseline.started(**_options(servers, redis_url, served, tmp_path)) as target:
        assert target.pids.keys() == {"api", "worker"}
        result = await Loop(served.url, model_delay_ms=0).round(target, concurrency=4, runs=12)
        async with await psycopg.AsyncConnection.connect(
            servers.admin_url.rsplit("/", 1)[0] + f"/{baseline.DATABASE}"
        ) as connection:
            row = await (
                await connection.execute("select count(distinct thread_id) from checkpoints")
            ).fetchone()
    assert row == (12,), "every run is checkpointed by the stock saver"
    assert [sample.failure for sample in result.samples] == [None] * 12
    for sample in result.samples:
        assert sample.submitted_at_s < sample.accepted_at_s < sample.first_token_at_s <= sample.terminal_at_s
        assert sample.submitted_at_s < sample.model_at_s < sample.first_token_at_s
    assert result.cpu_ms["worker"] > 0
    assert not any(psutil.pid_exists(pid) for pid in target.pids.values())
    async with Redis.from_url(redis_url) as redis:
        assert await redis.dbsize() == 0
    async with await psycopg.AsyncConnection.connect(servers.admin_url) as connection:
        left = await connection.execute("select 1 from pg_database where datname = %s", (baseline.DATABASE,))
        assert await left.fetchone() is None


async def test_a_model_delay_reaches_every_run(
    servers: TestServers, redis_url: str, served: Served, tmp_path: Path
) -> None:
    """Breaks when the directive is lost on its way: the first token would come at once."""
    async with baseline.started(**_options(servers, redis_url, served, tmp_path)) as target:
        result = await Loop(served.url, model_delay_ms=300).round(target, concurrency=2, runs=2)
    assert [sample.failure for sample in result.samples] == [None, None]
    assert all(sample.first_token_at_s - sample.model_at_s >= 0.3 for sample in result.samples)


async def test_a_redis_database_that_holds_something_is_refused_and_left_alone(
    servers: TestServers, redis_url: str, served: Served, tmp_path: Path
) -> None:
    async with Redis.from_url(redis_url) as redis:
        await redis.set("somebody's", "data", ex=600)
        with pytest.raises(RuntimeError, match="not empty"):
            async with baseline.started(**_options(servers, redis_url, served, tmp_path)):
                pass
        assert await redis.delete("somebody's") == 1
