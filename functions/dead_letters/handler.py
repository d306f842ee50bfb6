"""Consume dead-letter queues: hold each dead permit against PostgreSQL, report it, and let it go.

SQS removes the messages of a call that returns; one that fails is tried again.
"""

import asyncio
from collections import Counter
from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.data_classes import SQSEvent

from sandfleet.functions.emf import emit
from sandfleet.functions.lambda_database import connect
from sandfleet.functions.lambda_logs import failing_without_content, lambda_logger
from sandfleet.shared.dead_letters import pool_state, reconcile
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings, settings

_configured = settings()
logger = lambda_logger("sandfleet-dead-letters", _configured)


@logger.inject_lambda_context(clear_state=True)
@failing_without_content(logger)
def handler(event: dict[str, Any], _: Any) -> dict[str, int]:
    """Entry point of the function: an event of SQS. Returns how many permits of each pool were dead."""
    dead: Counter[str] = Counter()
    for record in SQSEvent(event).records:
        dead[record.body] += 1
        logger.warning(
            "dead permit",
            extra={
                "pool": record.body,
                "message_id": record.message_id,
                "receives": record.attributes.approximate_receive_count,
                "sent_ms": record.attributes.sent_timestamp,
            },
        )
    asyncio.run(_reconcile(_configured, dead))
    return dict(dead)


async def _reconcile(config: Settings, dead: Counter[str]) -> None:
    permits = Permits(config)
    try:
        async with await connect(config, "sandfleet-dead-letters") as connection:
            for pool, count in dead.items():
                state = await pool_state(connection, pool)
                sent = await reconcile(connection, permits, pool, count)
                logger.warning(
                    "permits of a pool died: executors took them and ended without a word",
                    extra={
                        "pool": pool,
                        "dead": count,
                        "sent_anew": sent,
                        "ready": state.ready,
                        "running": state.running,
                        "oldest_ready_s": round(state.oldest_ready_s, 1),
                        "executors": state.executors,
                        "most_deaths": state.most_deaths,
                    },
                )
                emit(
                    {"Deployment": config.deployment, "Pool": pool},
                    {"DeadPermits": (MetricUnit.Count, count)},
                )
    finally:
        await permits.aclose()
