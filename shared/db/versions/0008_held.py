"""Hosts say whose sandboxes they have."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    # [[tenant, user, run or sandbox without one], …] as of the last beat
    op.get_bind().exec_driver_sql("alter table hosts add column held jsonb not null default '[]'")
