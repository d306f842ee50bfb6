"""Alembic's entry point: one connection, one transaction, guarded by an advisory lock so that two deploys may race."""

from alembic import context
from sqlalchemy import create_engine, pool, text

_LOCK = 7_261_301  # any number that nothing else in the database uses

url = context.config.get_main_option("sqlalchemy.url")
assert url is not None
engine = create_engine(url, poolclass=pool.NullPool)
with engine.connect() as connection, connection.begin():
    connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    context.configure(connection=connection)
    context.run_migrations()
engine.dispose()
