"""Placement looks at templates and at disks; a tenant's own limit on snapshots; an Idempotency-Key makes a sandbox once."""

from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    text = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(text.replace("%", "%%"))
