"""What the reaper of sandboxes asks: which deployment this is, and where the folder of a host is."""

from pathlib import Path

from alembic import op

revision = "0006"
down_revision = "0005"

_HERE = Path(__file__).parent


def upgrade() -> None:
    op.get_bind().exec_driver_sql((_HERE / "0006_abandoned.sql").read_text().replace("%", "%%"))
