"""Bring the schema of a database to the newest revision. Safe to run from many places at once."""

from pathlib import Path

from alembic import command
from alembic.config import Config


def upgrade(database_url: str) -> None:
    """Apply all revisions that are missing, in one transaction. ``database_url`` is a libpq URL.

    Raises the database's error when it cannot be reached or a statement fails; nothing is applied then.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    scheme, _, rest = database_url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        raise ValueError("DATABASE_URL must begin with postgresql://")
    config.set_main_option("sqlalchemy.url", f"postgresql+psycopg://{rest}".replace("%", "%%"))
    command.upgrade(config, "head")
