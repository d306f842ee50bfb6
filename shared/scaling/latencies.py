"""How long the stages of runs took that have ended lately, from their write-once times on the database's clock."""

from typing import Any, LiteralString

from psycopg import AsyncConnection

_WITHIN_S = 60.0
_MOST = 2_000
"""Ended runs that are looked at, the newest: enough for a percentile."""

# stage: from, to
_STAGES: dict[str, tuple[LiteralString, LiteralString]] = {
    "Dispatch": ("created_at", "started_at"),
    "Preparation": ("started_at", "prepared_at"),
    "FirstOutput": ("created_at", "first_output_at"),
    "Total": ("created_at", "finished_at"),
}

_PERCENTILES = (50, 95)

_SELECTED: LiteralString = ", ".join(
    f"percentile_cont(array[0.5, 0.95]) within group (order by extract(epoch from {end} - {begin})::float8)"
    for begin, end in _STAGES.values()
)


async def recent_latencies(connection: AsyncConnection[Any], pool: str) -> dict[str, float]:
    """Seconds by stage and percentile (``DispatchP50`` …) of the pool's runs that ended within a minute.

    Dispatch is from accepted to begun, waiting at gates included; preparation from there to the graph's start; the first output
    and the total count from accepted. A stage that no run had is left out.
    """
    cursor = await connection.execute(
        f"""select {_SELECTED} from (
              select * from runs where finished_at > clock_timestamp() - make_interval(secs => %s) and not journal_expired
              order by finished_at desc limit %s) r
            where pool = %s and kind = 'run'""",
        (_WITHIN_S, _MOST, pool),
    )
    row = await cursor.fetchone()
    assert row is not None
    return {
        f"{stage}P{percent}": value
        for stage, values in zip(_STAGES, row, strict=True)
        for percent, value in zip(_PERCENTILES, values or (), strict=False)
    }
