"""Dead permits: those that SQS has delivered so often, each time to an executor that died, that it put them aside.

No run depends on one, since PostgreSQL finds ready runs without permits. They are a sign: somebody should look at why
executors die.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from psycopg import AsyncConnection

from sandfleet.shared.permits import Permits

_BATCH = 10  # messages in one SQS call at most
LOOK_S = 30
"""A listed permit is hidden from the next look for so long."""

_SILENT_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class DeadPermit:
    """A permit in a dead-letter queue. ``receives`` counts its deliveries, ``handle`` deletes it for ``LOOK_S``."""

    pool: str
    message_id: str
    sent_at: datetime
    receives: int
    handle: str


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a pool stands in PostgreSQL: what its permits were for."""

    ready: int
    running: int
    oldest_ready_s: float
    executors: int
    most_deaths: int
    """Executor deaths in a row of the run that has most."""


async def pool_state(connection: AsyncConnection[Any], pool: str) -> PoolState:
    """Read how a pool stands now."""
    cursor = await connection.execute(
        """select
             (select count(*) from runs where status = 'pending' and gate is null and pool = %(pool)s),
             (select count(*) from runs where status = 'running' and pool = %(pool)s),
             coalesce((select extract(epoch from clock_timestamp() - min(ready_at)) from runs
               where status = 'pending' and gate is null and pool = %(pool)s), 0)::float8,
             (select count(*) from executors where pool = %(pool)s
               and heartbeat_at > clock_timestamp() - make_interval(secs => %(silent_s)s)),
             greatest(
               (select max(deaths) from runs where status = 'running' and pool = %(pool)s),
               (select max(deaths) from runs where status = 'pending' and gate is null and pool = %(pool)s), 0)""",
        {"pool": pool, "silent_s": _SILENT_AFTER_S},
    )
    row = await cursor.fetchone()
    assert row is not None
    return PoolState(*row)


async def reconcile(connection: AsyncConnection[Any], permits: Permits, pool: str, dead: int) -> int:
    """Put what dead permits stood for right: send as many anew as ready runs lack one, at most ``dead``; returns how
    many. A fresh permit counts deaths from zero."""
    state = await pool_state(connection, pool)
    if not state.ready or not permits.has_queue(pool):
        return 0
    count = max(0, min(dead, state.ready - await permits.visible(pool)))
    await permits.send(pool, count)
    return count


async def dead_permits(permits: Permits, limit: int) -> list[DeadPermit]:
    """Up to ``limit`` dead permits of each pool, in no order. Raises what the SQS client raises."""
    found: list[DeadPermit] = []
    for pool, url in (await dead_letter_urls(permits)).items():
        sqs, seen = await permits.client(), 0
        while seen < limit:
            answer = await sqs.receive_message(
                QueueUrl=url,
                MaxNumberOfMessages=min(_BATCH, limit - seen),
                VisibilityTimeout=LOOK_S,
                WaitTimeSeconds=0,
                AttributeNames=["SentTimestamp", "ApproximateReceiveCount"],
            )
            messages = answer.get("Messages", [])
            if not messages:
                break
            seen += len(messages)
            found += [
                DeadPermit(
                    pool,
                    message["MessageId"],
                    datetime.fromtimestamp(int(message["Attributes"]["SentTimestamp"]) / 1000, UTC),
                    int(message["Attributes"]["ApproximateReceiveCount"]),
                    message["ReceiptHandle"],
                )
                for message in messages
            ]
    return found


async def redrive(permits: Permits, dead: Sequence[DeadPermit]) -> int:
    """Send a fresh permit for each dead one, and remove those. Sent first: one too many is found to be surplus. Returns how
    many could not be removed, since they were listed more than ``LOOK_S`` ago: these come back."""
    left = 0
    urls = await dead_letter_urls(permits)
    for pool in {permit.pool for permit in dead}:
        handles = [permit.handle for permit in dead if permit.pool == pool]
        for start in range(0, len(handles), _BATCH):
            batch = handles[start : start + _BATCH]
            await permits.send(pool, len(batch))
            answer = await (await permits.client()).delete_message_batch(
                QueueUrl=urls[pool],
                Entries=[{"Id": str(n), "ReceiptHandle": handle} for n, handle in enumerate(batch)],
            )
            left += len(answer.get("Failed", []))
    return left


async def dead_letter_urls(permits: Permits) -> dict[str, str]:
    """The dead-letter queue of each pool that has one, by the redrive policy of its queue."""
    sqs = await permits.client()

    async def of(pool: str) -> str | None:
        answer = await sqs.get_queue_attributes(QueueUrl=permits.url(pool), AttributeNames=["RedrivePolicy"])
        policy = answer.get("Attributes", {}).get("RedrivePolicy")
        if not policy:
            return None
        name = json.loads(policy)["deadLetterTargetArn"].rsplit(":", 1)[1]
        return str((await sqs.get_queue_url(QueueName=name))["QueueUrl"])

    pools = permits.pools()
    urls = await asyncio.gather(*(of(pool) for pool in pools))
    return {pool: url for pool, url in zip(pools, urls, strict=True) if url is not None}
