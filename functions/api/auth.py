"""Authentication: a key in ``x-api-key`` or as a bearer token, turned into the (tenant, user) of the request."""

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from sandfleet.functions.api.errors import DATABASE_AWAY, database_away
from sandfleet.functions.api.request_context import note
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.responses import error_response
from sandfleet.shared.errors import Unauthenticated
from sandfleet.shared.ids import Owner
from sandfleet.shared.store.api_keys import find_owner, hash_key

PUBLIC_PATHS = frozenset({"/ok", "/info", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/system/ready"})

_KEEP_S = 5.0  # a revoked key works this much longer at most
_KEEP_KEYS = 10_000


class Authentication:
    """ASGI middleware: puts the owner into ``scope["state"]["owner"]`` or answers 401. Good keys are remembered for a
    few seconds by their hash; bad ones never are."""

    def __init__(self, app: ASGIApp, resources: Resources) -> None:
        self._app = app
        self._resources = resources
        self._known: dict[bytes, tuple[Owner, float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            key = _key(scope)
            try:
                owner = await self._owner(key) if key else None
            except DATABASE_AWAY as error:  # the application's own handlers are further in
                await database_away(error)(scope, receive, send)
                return
            if owner is None:
                reason = "Unknown or revoked API key." if key else "Send an API key in the header x-api-key."
                refusal = error_response(Unauthenticated(reason), {"www-authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = owner
            note(tenant=owner.tenant)
        await self._app(scope, receive, send)

    async def _owner(self, key: str) -> Owner | None:
        digest = hash_key(key)
        now = time.monotonic()
        known = self._known.get(digest)
        if known is not None and now < known[1]:
            return known[0]
        owner = await find_owner(self._resources.pool, key)
        if owner is None:
            self._known.pop(digest, None)
            return None
        if len(self._known) >= _KEEP_KEYS:
            self._known.clear()
        self._known[digest] = (owner, now + _KEEP_S)
        return owner


def _key(scope: Scope) -> str | None:
    bearer = None
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return str(value.decode("latin-1")).strip()
        if name == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer":
                bearer = token.strip()
    return bearer
