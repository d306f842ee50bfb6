"""What the reaper of sandboxes asks: which deployment this is, and where the folder of a host is."""

from pathlib import Path

from alembic import op

revision = "0005"
down_revision = "0004"

_HERE = Path(__file__).parent


def upgrade() -> None:
    op.get_bind().exec_driver_sql((_HERE / "0005_abandoned.sql").read_text().replace("%", "%%"))
