"""Sandboxes without a run; the templates that hosts offer; a tenant's own limit on such sandboxes."""

from pathlib import Path

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    text = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(text.replace("%", "%%"))
