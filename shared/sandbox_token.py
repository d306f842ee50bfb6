"""Signed tokens by which an executor proves to a sandbox host that it owns a run.

``s1.<payload>.<signature>``: the payload is a JSON array of tenant, user, run, attempt and expiry in unpadded
URL-safe base64, the signature its HMAC-SHA256 in the same alphabet. Times are epoch seconds of the database's clock.
"""

import base64
import binascii
import hashlib
import hmac
import json
import math
import uuid
from typing import NamedTuple

from sandfleet.shared.errors import Unauthenticated
from sandfleet.shared.ids import Fence, RunKey

_VERSION = "s1"
_MAX_LENGTH = 4096


class SandboxTokenInvalid(Unauthenticated):
    """The sandbox token is missing, malformed or signed with another key than SANDFLEET_HOST_SECRET of the host."""

    code = "sandbox_token_invalid"


class SandboxTokenExpired(Unauthenticated):
    """The sandbox token is past its expiry: renew the lease of the run and sign a new one."""

    code = "sandbox_token_expired"


class SandboxClaim(NamedTuple):
    """What a verified token says: the run, the attempt that owns it, and until when (epoch seconds, database)."""

    fence: Fence
    expires_at: float


def sign(secret: str, fence: Fence, expires_at: float) -> str:
    """A token for this run and attempt, valid until ``expires_at`` (epoch seconds of the database's clock).

    Raises ValueError if the secret is empty: such a token would protect nothing.
    """
    key, attempt = fence
    payload = json.dumps(
        [key.tenant, key.user_id, key.run_id.hex, attempt, expires_at], separators=(",", ":")
    ).encode()
    body = f"{_VERSION}.{_encode(payload)}"
    return f"{body}.{_encode(_signature(secret, body))}"


def verify(secret: str, token: str, now: float) -> SandboxClaim:
    """What ``token`` claims, if it was signed with ``secret`` and ``now`` (database clock) is before its expiry.

    Raises SandboxTokenInvalid or SandboxTokenExpired.
    """
    body, _, signature = token.rpartition(".")
    if len(token) > _MAX_LENGTH or not token.isascii() or not body.startswith(f"{_VERSION}."):
        raise SandboxTokenInvalid("The sandbox token is missing or malformed.")
    if not hmac.compare_digest(_encode(_signature(secret, body)), signature):
        raise SandboxTokenInvalid(
            "The sandbox token was signed with another key: executors and hosts need one SANDFLEET_HOST_SECRET."
        )
    try:
        tenant, user_id, run_id, attempt, expires_at = json.loads(_decode(body.partition(".")[2]))
        claim = SandboxClaim(
            Fence(RunKey(str(tenant), str(user_id), uuid.UUID(run_id)), int(attempt)), float(expires_at)
        )
    except (ValueError, TypeError, AttributeError, binascii.Error) as error:
        raise SandboxTokenInvalid("The sandbox token is malformed.") from error
    if not math.isfinite(claim.expires_at) or now >= claim.expires_at:
        raise SandboxTokenExpired("The sandbox token has expired: renew the run's lease and sign a new one.")
    return claim


def _signature(secret: str, body: str) -> bytes:
    if not secret:
        raise ValueError("SANDFLEET_HOST_SECRET is empty; sandbox tokens need a key")
    return hmac.new(secret.encode(), body.encode(), hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
