"""The graphs of the deployment as the API knows them, and whether anybody serves them."""

from dataclasses import dataclass

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import NotFound


@dataclass(frozen=True, slots=True)
class GraphDescription:
    """What an executor said of a graph when it registered it. JSON objects are texts."""

    graph_id: str
    schemas: str
    """The SDK's GraphSchema without ``graph_id``."""
    drawings: str
    """``{"0": {nodes, edges}, "1": …}`` by how many levels of subgraphs are opened."""


async def describe(pool: Pool, graph_id: str) -> GraphDescription:
    """Raises NotFound for a graph that is not registered."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select graph_id, schemas::text, drawings::text from graphs where graph_id = %s", (graph_id,)
        )
        row = await cursor.fetchone()
    if row is None:
        raise NotFound(f"Graph {graph_id!r} is not deployed any more.")
    return GraphDescription(*row)


@dataclass(frozen=True, slots=True)
class Readiness:
    """What runs need besides the database: graphs, and executors that have given a sign of life a moment ago."""

    graphs: int
    executors: int
    pools_without_executor: list[str]


async def readiness(pool: Pool, silent_after_s: float) -> Readiness:
    """How many graphs are registered and executors alive; an executor silent for ``silent_after_s`` does not count."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """with alive as (select pool from executors
                              where heartbeat_at > clock_timestamp() - make_interval(secs => %s))
               select (select count(*) from graphs), (select count(*) from alive),
                      array(select distinct pool from graphs where pool not in (select pool from alive) order by pool)""",
            (silent_after_s,),
        )
        row = await cursor.fetchone()
    assert row is not None
    return Readiness(*row)
