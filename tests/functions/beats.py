"""Executors that beat though there is no process of theirs."""

from typing import Any

from sandfleet.fleet.executor.registration import heartbeat


async def beat(
    connection: Any,
    name: str,
    busy: int,
    host_id: str | None = None,
    *,
    task: str | None = None,
    draining: bool = False,
) -> None:
    """A beat that lasts for the test, however slow the machine is."""
    await heartbeat(
        connection,
        name,
        "default",
        host_id,
        slots=16,
        busy=busy,
        loop_lag_ms=0,
        task=task,
        draining=draining,
    )
    await connection.execute(
        "update executors set heartbeat_at = clock_timestamp() + interval '1 hour' where executor_id = %s",
        (name,),
    )


async def retired(connection: Any) -> set[str]:
    cursor = await connection.execute(
        "select executor_id from executors where retiring_until > clock_timestamp()"
    )
    return {name for (name,) in await cursor.fetchall()}
