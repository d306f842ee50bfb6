"""The first schema: tenants, assistants, threads, runs with gates, journal, checkpoints, state snapshots."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None

_HERE = Path(__file__).parent


def upgrade() -> None:
    connection = op.get_bind()
    for name in ("0001_tables.sql", "0001_functions.sql", "0001_placements.sql", "0001_statistics.sql"):
        connection.exec_driver_sql((_HERE / name).read_text().replace("%", "%%"))
