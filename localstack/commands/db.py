"""``sandfleet db migrate``: bring a database to the newest schema."""

import asyncio
import os
from pathlib import Path

from sandfleet.localstack import dev_file
from sandfleet.localstack.terminal import out


async def migrate(root: Path) -> int:
    """Migrate ``DATABASE_URL``, else the database of the stack that runs in ``root``."""
    from sandfleet.shared.db.migrate import upgrade

    url = os.environ.get("DATABASE_URL") or dev_file.read(root / "dev.json").database_url
    await asyncio.to_thread(upgrade, url)
    out.print("The database has the newest schema.")
    return 0
