"""Undoing a run that went on from another one's checkpoint: whose each pending write is, and what it replaced."""

from pathlib import Path

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    text = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(text.replace("%", "%%"))
