"""Executors that are too many take nothing more."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.get_bind().exec_driver_sql("alter table executors add column retiring_until timestamptz")
