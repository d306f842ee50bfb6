"""Alembic's entry point: one connection, one transaction, guarded by an advisory lock so that two deploys may race."""

import logging

from alembic import context
from sqlalchemy import create_engine, pool, text

_LOCK = 7_261_301  # any number that nothing else in the database uses
_LOCK_TIMEOUT_MS = 3_000  # for a table: whoever wants it after us waits for as long, behind us

logger = logging.getLogger("sandfleet.shared.db.migrate")

url = context.config.get_main_option("sqlalchemy.url")
assert url is not None
engine = create_engine(url, poolclass=pool.NullPool)
with engine.connect() as connection, connection.begin():
    connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    connection.execute(text(f"set local lock_timeout = {_LOCK_TIMEOUT_MS}"))
    context.configure(connection=connection)
    known = {revision.revision for revision in context.script.walk_revisions()}
    if later := set(context.get_context().get_current_heads()) - known:
        logger.warning(
            "the schema is that of a later version, and stays so", extra={"revisions": sorted(later)}
        )
    else:
        context.run_migrations()
engine.dispose()
