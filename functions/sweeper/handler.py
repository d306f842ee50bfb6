"""Sweep while no executor does.

EventBridge calls this once a minute at best, and leases expire only while sweeps come without a pause (a database that was
away must not cost an attempt). So one call goes on for a lease and some, unless executors take the turns.
"""

import asyncio
import time
from typing import Any

from aws_lambda_powertools import Metrics
from aws_lambda_powertools.metrics import MetricUnit
from psycopg import AsyncConnection
from redis.asyncio import Redis

from sandfleet.functions.lambda_database import connect
from sandfleet.functions.lambda_logs import failing_without_content, lambda_logger
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings, settings
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.store.sweep import set_limits, sweep_as_configured
from sandfleet.shared.store.turns import take_sweep_turn
from sandfleet.shared.streams.announce import announce_ends
from sandfleet.shared.top_up import missing_permits, wanted_permits
from sandfleet.shared.waker import Waker

_MARGIN_S = 5.0  # passes beyond a lease, and what must be left of the call's time
_OTHERS_SWEEP = 3  # turns in a row that somebody else took

_configured = settings()
logger = lambda_logger("sandfleet-sweeper", _configured)
metrics = Metrics(namespace="sandfleet", service="sweeper")


@logger.inject_lambda_context(clear_state=True)
@metrics.log_metrics(default_dimensions={"Deployment": _configured.deployment})
@failing_without_content(logger)
def handler(_: dict[str, Any], context: Any) -> dict[str, int]:
    """Entry point of the function. Returns how many passes were made and how many runs became ready by them."""
    limit_s = context.get_remaining_time_in_millis() / 1000 - _MARGIN_S
    passes, ready, oldest_s = asyncio.run(_sweep(_configured, min(_configured.lease_s + _MARGIN_S, limit_s)))
    metrics.add_metric(name="SweepPasses", unit=MetricUnit.Count, value=passes)
    metrics.add_metric(name="RunsMadeReady", unit=MetricUnit.Count, value=ready)
    metrics.add_metric(name="OldestTransactionAge", unit=MetricUnit.Seconds, value=oldest_s)
    logger.info("swept", extra={"passes": passes, "ready": ready})
    return {"passes": passes, "ready": ready}


async def _sweep(config: Settings, for_s: float) -> tuple[int, int, float]:
    end = time.monotonic() + for_s
    passes = made_ready = missed = 0
    permits = Permits(config)
    redis = Redis.from_url(config.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0)
    waker = Waker(redis, permits)
    try:
        async with await connect(config, "sandfleet-sweeper") as connection:
            oldest_s = await _oldest_transaction_s(connection)
            await set_limits(connection)
            while missed < _OTHERS_SWEEP:
                next_s = await take_sweep_turn(connection, config.sweep_every_s)
                if next_s is None:
                    missed, next_s = missed + 1, config.sweep_every_s
                else:
                    missed, passes = 0, passes + 1
                    ended: list[EndedRun] = []
                    ready = await sweep_as_configured(connection, config, ended)
                    await announce_ends(redis, config, ended)
                    made_ready += sum(ready.values())
                    waker.wake_all(ready)
                    waker.wake_all(await missing_permits(permits, await wanted_permits(connection)))
                if time.monotonic() + next_s > end:
                    break
                await asyncio.sleep(max(0.0, next_s))
        await waker.flush()
    finally:
        await permits.aclose()
        await redis.aclose()
    return passes, made_ready, oldest_s


async def _oldest_transaction_s(connection: AsyncConnection[Any]) -> float:
    """How long the oldest transaction of any client has been open: its snapshot keeps dead rows, which slows claims."""
    row = await (
        await connection.execute(
            """select coalesce(max(extract(epoch from clock_timestamp() - xact_start)), 0)::float from pg_stat_activity
               where backend_type = 'client backend' and pid <> pg_backend_pid()"""
        )
    ).fetchone()
    return 0.0 if row is None else float(row[0])
