"""Assistants and their versions. Those of a deployment, one per graph, belong to nobody and are read by everybody."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import Conflict, Forbidden, NotFound
from sandfleet.shared.ids import Owner

SORT_COLUMNS = ("assistant_id", "graph_id", "name", "created_at", "updated_at")

_COLUMNS = """assistant_id, graph_id, name, description, config::text as config, context::text as context,
  metadata::text as metadata, version, created_at, updated_at"""
_VISIBLE = "(tenant, user_id) in ((%(tenant)s, %(user_id)s), ('', ''))"
_MINE_FIRST = "order by tenant = '' limit 1"
_MISSING = "Assistant not found."


@dataclass(frozen=True, slots=True)
class Assistant:
    """An assistant, or one version of it (``updated_at`` is then the time it was made). JSON objects are texts."""

    assistant_id: UUID
    graph_id: str
    name: str
    description: str | None
    config: str
    context: str
    metadata: str
    version: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Runnable:
    """What a submission needs to know of an assistant and its graph. JSON objects are texts."""

    assistant_id: UUID
    graph_id: str
    pool: str
    config: str
    context: str
    metadata: str
    sandbox_templates: list[str] | None
    """The sandbox templates that its runs may have; None: not known here, the executor checks it."""
    is_system: bool
    """It is the deployment's own."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What a search or a count looks for."""

    metadata: str | None = None
    """JSON text of an object that the assistant's metadata must contain."""
    graph_id: str | None = None
    name: str | None = None
    """Part of the name, in any case."""


class Given(NamedTuple):
    """What a caller says of an assistant; None: nothing. JSON objects are texts."""

    graph_id: str | None
    name: str | None
    description: str | None
    config: str | None
    context: str | None
    metadata: str


async def find_runnable(pool: Pool, owner: Owner, assistant_id: UUID) -> Runnable | None:
    """The assistant and the pool of its graph; None when it or its graph is unknown."""
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(Runnable)) as cursor:
        await cursor.execute(
            f"""select assistant_id, graph_id, pool, config::text as config, context::text as context,
                       metadata::text as metadata, sandbox_templates, tenant = '' as is_system
                from assistants join graphs using (graph_id)
                where {_VISIBLE} and assistant_id = %(id)s {_MINE_FIRST}""",
            _scope(owner, id=assistant_id),
        )
        return await cursor.fetchone()


async def get(pool: Pool, owner: Owner, assistant_id: UUID) -> Assistant:
    """One assistant of the owner or of the deployment. Raises NotFound."""
    async with pool.connection() as connection:
        return await _get(connection, owner, assistant_id)


async def search(
    pool: Pool, owner: Owner, wanted: Filter, *, sort_by: str, descending: bool, limit: int, offset: int
) -> list[Assistant]:
    """Assistants of the owner and the deployment. ``sort_by`` is one of `SORT_COLUMNS`."""
    assert sort_by in SORT_COLUMNS
    direction = "desc" if descending else "asc"
    where, parameters = _where(owner, wanted)
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(Assistant)) as cursor:
        await cursor.execute(
            f"""select {_COLUMNS} from assistants where {where}
                order by {sort_by} {direction}, assistant_id limit %(limit)s offset %(offset)s""",
            {**parameters, "limit": limit, "offset": offset},
        )
        return await cursor.fetchall()


async def count(pool: Pool, owner: Owner, wanted: Filter) -> int:
    """How many assistants a search would find."""
    where, parameters = _where(owner, wanted)
    async with pool.connection() as connection:
        cursor = await connection.execute(f"select count(*) from assistants where {where}", parameters)
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def create(
    pool: Pool, owner: Owner, assistant_id: UUID, given: Given, *, return_existing: bool
) -> Assistant:
    """Make an assistant at version 1; its graph and its name must be given. Raises NotFound for an unknown graph, and
    Conflict when the id is taken unless ``return_existing``, which returns the old one unchanged."""
    async with pool.connection() as connection, connection.transaction():
        await _require_graph(connection, given.graph_id)
        cursor = await connection.execute(
            """insert into assistants (tenant, user_id, assistant_id, graph_id, name, description, config, context, metadata)
               select %(tenant)s, %(user_id)s, %(id)s, %(graph_id)s, %(name)s, %(description)s,
                      coalesce(%(config)s::json, '{}'), coalesce(%(context)s::json, '{}'), %(metadata)s::jsonb
               where not exists (select 1 from assistants where tenant = '' and user_id = '' and assistant_id = %(id)s)
               on conflict do nothing returning 1""",
            _scope(owner, id=assistant_id, **given._asdict()),
        )
        if await cursor.fetchone():
            await _add_version(connection, owner, assistant_id)
        elif not return_existing:
            raise Conflict(
                "An assistant with this id exists already. Use another id, or if_exists 'do_nothing'."
            )
        return await _get(connection, owner, assistant_id)


async def update(pool: Pool, owner: Owner, assistant_id: UUID, given: Given) -> Assistant:
    """Make a new version: what is not given stays, ``metadata`` is merged by its top-level keys, the rest is replaced.

    Raises NotFound, also for an unknown graph, and Forbidden for an assistant of the deployment.
    """
    async with pool.connection() as connection, connection.transaction():
        await _lock(connection, owner, assistant_id)
        if given.graph_id is not None:
            await _require_graph(connection, given.graph_id)
        await connection.execute(
            """update assistants set
                 graph_id = coalesce(%(graph_id)s, graph_id), name = coalesce(%(name)s, name),
                 description = coalesce(%(description)s, description), config = coalesce(%(config)s::json, config),
                 context = coalesce(%(context)s::json, context), metadata = metadata || %(metadata)s::jsonb,
                 version = 1 + (select max(version) from assistant_versions v
                                where v.tenant = %(tenant)s and v.user_id = %(user_id)s and v.assistant_id = %(id)s),
                 updated_at = clock_timestamp()
               where tenant = %(tenant)s and user_id = %(user_id)s and assistant_id = %(id)s""",
            _scope(owner, id=assistant_id, **given._asdict()),
        )
        await _add_version(connection, owner, assistant_id)
        return await _get(connection, owner, assistant_id)


async def set_latest(pool: Pool, owner: Owner, assistant_id: UUID, version: int) -> Assistant:
    """Make an older version the current one. Raises NotFound for an unknown assistant or version."""
    async with pool.connection() as connection, connection.transaction():
        await _lock(connection, owner, assistant_id)
        cursor = await connection.execute(
            """update assistants a set graph_id = v.graph_id, name = v.name, description = v.description, config = v.config,
                 context = v.context, metadata = v.metadata, version = v.version, updated_at = clock_timestamp()
               from assistant_versions v
               where a.tenant = %(tenant)s and a.user_id = %(user_id)s and a.assistant_id = %(id)s
                 and v.tenant = a.tenant and v.user_id = a.user_id and v.assistant_id = a.assistant_id
                 and v.version = %(version)s
               returning 1""",
            _scope(owner, id=assistant_id, version=version),
        )
        if not await cursor.fetchone():
            raise NotFound("Assistant or version not found.")
        return await _get(connection, owner, assistant_id)


async def versions(
    pool: Pool, owner: Owner, assistant_id: UUID, *, metadata: str | None, limit: int, offset: int
) -> Sequence[Assistant]:
    """Versions of an assistant, newest first. Raises NotFound."""
    async with pool.connection() as connection:
        await _get(connection, owner, assistant_id)
        async with connection.cursor(row_factory=class_row(Assistant)) as cursor:
            # A deployment's assistant has the one version that it was made with.
            await cursor.execute(
                f"""select * from (
                      select {_COLUMNS.replace("updated_at", "created_at as updated_at")} from assistant_versions
                      where tenant = %(tenant)s and user_id = %(user_id)s and assistant_id = %(id)s
                      union all
                      select {_COLUMNS} from assistants where tenant = '' and user_id = '' and assistant_id = %(id)s) v
                    where %(metadata)s::jsonb is null or metadata::jsonb @> %(metadata)s::jsonb
                    order by version desc limit %(limit)s offset %(offset)s""",
                _scope(owner, id=assistant_id, metadata=metadata, limit=limit, offset=offset),
            )
            return await cursor.fetchall()


async def delete(pool: Pool, owner: Owner, assistant_id: UUID) -> None:
    """Delete an assistant and its versions. Raises NotFound, and Forbidden for an assistant of the deployment."""
    async with pool.connection() as connection, connection.transaction():
        await _lock(connection, owner, assistant_id)
        for table in ("assistant_versions", "assistants"):
            await connection.execute(
                f"delete from {table} where tenant = %(tenant)s and user_id = %(user_id)s and assistant_id = %(id)s",
                _scope(owner, id=assistant_id),
            )


def _scope(owner: Owner, **more: Any) -> dict[str, Any]:
    return {"tenant": owner.tenant, "user_id": owner.user_id, **more}


def _where(owner: Owner, wanted: Filter) -> tuple[str, dict[str, Any]]:
    conditions = [_VISIBLE]
    if wanted.metadata is not None:
        conditions.append("metadata @> %(metadata)s::jsonb")
    if wanted.graph_id is not None:
        conditions.append("graph_id = %(graph_id)s")
    if wanted.name is not None:
        conditions.append("strpos(lower(name), lower(%(name)s)) > 0")
    return " and ".join(conditions), _scope(
        owner, metadata=wanted.metadata, graph_id=wanted.graph_id, name=wanted.name
    )


async def _get(connection: AsyncConnection[Any], owner: Owner, assistant_id: UUID) -> Assistant:
    async with connection.cursor(row_factory=class_row(Assistant)) as cursor:
        await cursor.execute(
            f"select {_COLUMNS} from assistants where {_VISIBLE} and assistant_id = %(id)s {_MINE_FIRST}",
            _scope(owner, id=assistant_id),
        )
        row = await cursor.fetchone()
    if row is None:
        raise NotFound(_MISSING)
    return row


async def _lock(connection: AsyncConnection[Any], owner: Owner, assistant_id: UUID) -> None:
    cursor = await connection.execute(
        "select 1 from assistants where tenant = %(tenant)s and user_id = %(user_id)s and assistant_id = %(id)s for update",
        _scope(owner, id=assistant_id),
    )
    if await cursor.fetchone() is not None:
        return
    await _get(connection, owner, assistant_id)
    raise Forbidden("This assistant belongs to the deployment and cannot be changed. Create one of your own.")


async def _require_graph(connection: AsyncConnection[Any], graph_id: str | None) -> None:
    cursor = await connection.execute("select 1 from graphs where graph_id = %s", (graph_id,))
    if not await cursor.fetchone():
        raise NotFound(
            f"Graph {graph_id!r} not found. Deployed graphs are listed by POST /assistants/search."
        )


async def _add_version(connection: AsyncConnection[Any], owner: Owner, assistant_id: UUID) -> None:
    await connection.execute(
        """insert into assistant_versions
             (tenant, user_id, assistant_id, version, graph_id, name, description, config, context, metadata)
           select tenant, user_id, assistant_id, version, graph_id, name, description, config, context, metadata
           from assistants where tenant = %(tenant)s and user_id = %(user_id)s and assistant_id = %(id)s""",
        _scope(owner, id=assistant_id),
    )
