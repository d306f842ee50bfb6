"""Bring the schema of a database to the newest revision. Safe to run from many places at once, and beside running processes."""

import logging
import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from psycopg.errors import DeadlockDetected, LockNotAvailable
from sqlalchemy.exc import OperationalError

from sandfleet.shared.errors import Unavailable

logger = logging.getLogger(__name__)

_TRIES = 20
_PAUSE_S = 5.0  # between tries: longer than one may hold others up


def upgrade(database_url: str, revision: str = "head") -> None:
    """Apply all revisions that are missing, up to ``revision``, in one transaction. ``database_url`` is a libpq URL.

    A schema that a later version has made stays as it is: it only ever grows, so this version works with it.

    A transaction of somebody else that is long holds a table that is to be changed, and whoever comes after us would wait
    behind us: so we give up after seconds, let the others pass and try again. Raises Unavailable when that has not helped for
    minutes, and the database's error when it cannot be reached or a statement fails. Nothing is applied then.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    scheme, _, rest = database_url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        raise ValueError("DATABASE_URL must begin with postgresql://")
    config.set_main_option("sqlalchemy.url", f"postgresql+psycopg://{rest}".replace("%", "%%"))
    for tried in range(1, _TRIES + 1):
        try:
            command.upgrade(config, revision)
            return
        except OperationalError as error:
            if not isinstance(error.orig, LockNotAvailable | DeadlockDetected):
                raise
            if tried == _TRIES:
                raise Unavailable(
                    "The schema was not changed: other transactions hold its tables. End those that are long "
                    "(pg_stat_activity, xact_start), then migrate again."
                ) from error
            logger.warning("the schema's tables are in use; tries again", extra={"tried": tried})
            time.sleep(_PAUSE_S)
