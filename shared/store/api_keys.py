"""API keys: shown once, stored as a hash, each bound to one tenant and user."""

import hashlib
import secrets

from psycopg import AsyncConnection

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import Owner
from sandfleet.shared.settings import settings

_PREFIX = "sf_"


def hash_key(key: str) -> bytes:
    """What is stored. A fast hash is right here: keys are 256 random bits, not passwords."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


async def create_key(connection: AsyncConnection[tuple[object, ...]], owner: Owner, name: str) -> str:
    """Make a key for a tenant's user and return it; it cannot be read again. The tenant is made if it is new,
    with the limits of ``SANDFLEET_TENANT_MAX_IN_FLIGHT`` and ``SANDFLEET_TENANT_MAX_QUEUED``."""
    key = _PREFIX + secrets.token_urlsafe(32)
    async with connection.transaction():
        await connection.execute(
            "insert into tenants (tenant, max_in_flight, max_queued) values (%s, %s, %s) on conflict do nothing",
            (owner.tenant, settings().tenant_max_in_flight, settings().tenant_max_queued),
        )
        await connection.execute(
            "insert into api_keys (key_hash, tenant, user_id, name) values (%s, %s, %s, %s)",
            (hash_key(key), owner.tenant, owner.user_id, name),
        )
    return key


async def find_owner(pool: Pool, key: str) -> Owner | None:
    """Who a key speaks for; None when it is unknown or revoked."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select tenant, user_id from api_keys where key_hash = %s and revoked_at is null",
            (hash_key(key),),
        )
        row = await cursor.fetchone()
    return Owner(*row) if row else None
