"""What the API answers when it does not do what was asked."""

from typing import Any

import httpx


class ApiError(Exception):
    """A refusal: ``status`` of HTTP, ``code`` for programs, and a message that says what to do.

    ``retry_after_s``: when to try again, if the API says so.
    """

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class SandboxLost(ApiError):
    """The sandbox that was known is gone, and another one is in its place, with the files of the snapshot ``restored``, or
    empty if that is None. The next call goes to it."""

    def __init__(self, message: str, generation: int, restored: str | None) -> None:
        super().__init__(410, "sandbox_lost", message)
        self.generation = generation
        self.restored = restored


def refusal(response: httpx.Response) -> ApiError:
    """The error that a response tells, whose body was read."""
    try:
        found: dict[str, Any] = response.json()
        code, message = str(found["code"]), str(found["detail"])
    except (ValueError, KeyError, TypeError):
        return ApiError(
            response.status_code, "http_error", f"The API answered with status {response.status_code}."
        )
    if code == "sandbox_lost":
        return SandboxLost(message, found["generation"], found["restored"])
    retry = response.headers.get("retry-after", "")
    return ApiError(response.status_code, code, message, int(retry) if retry.isdigit() else None)


def told(event: dict[str, Any]) -> ApiError:
    """The error that an event of a stream tells."""
    if event["error"] == "sandbox_lost":
        return SandboxLost(event["message"], event["generation"], event["restored"])
    return ApiError(502, event["error"], event["message"])
