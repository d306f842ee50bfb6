"""What a front puts before each path (an API Gateway its stage, a custom domain its mapping), taken off again."""

from starlette.types import ASGIApp, Receive, Scope, Send


def without_prefix(path: str, prefix: str) -> str:
    """The path below ``prefix``; as it is if it is not below it."""
    if path == prefix:
        return "/"
    return path[len(prefix) :] if path.startswith(f"{prefix}/") else path


class WithoutPrefix:
    """ASGI middleware, outside of all that looks at the path. Requests without the prefix, as health checks, pass, too."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # In place: what the application notes in the scope is read outside of it.
            scope["path"] = without_prefix(scope["path"], self._prefix)
            if raw := scope.get("raw_path"):
                scope["raw_path"] = without_prefix(raw.decode("latin-1"), self._prefix).encode("latin-1")
        await self._app(scope, receive, send)
