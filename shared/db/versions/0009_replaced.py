"""Executors of an older version hand their work over while ECS replaces them."""

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.get_bind().exec_driver_sql(
        """alter table executors
             add column task     text,                              -- id of the ECS task that it is
             add column replaced boolean not null default false     -- retires for a newer one, and protects its task no longer"""
    )
