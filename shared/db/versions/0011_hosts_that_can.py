"""Placement looks at templates and at disks; a tenant's own limit on snapshots."""

from pathlib import Path

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    text = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(text.replace("%", "%%"))
