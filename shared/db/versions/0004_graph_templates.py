"""Which sandbox templates the runs of a graph may have."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # The default first. null: an executor registered the graph that does not say so.
    op.execute("alter table graphs add column sandbox_templates text[]")
