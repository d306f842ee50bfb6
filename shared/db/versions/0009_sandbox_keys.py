"""An Idempotency-Key for the creation of a sandbox."""

from pathlib import Path

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    text = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(text.replace("%", "%%"))
