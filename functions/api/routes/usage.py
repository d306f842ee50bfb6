"""What the caller's runs have used of models."""

import re
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.requests import caller, query_int, resources
from sandfleet.functions.api.responses import json_response, page_headers
from sandfleet.shared.errors import InvalidRequest
from sandfleet.shared.store import usage
from sandfleet.shared.store.usage import By

router = APIRouter(tags=["usage"])

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_DAYS = 30
_MOST_DAYS = 400
_BY: tuple[By, ...] = ("day", "model")


@router.get("/usage")
async def get(request: Request) -> Response:
    """Calls, tokens and costs of the caller. Query: from and to (days in UTC, both included; the last 30), by (day or model),
    limit, offset."""
    last = _day(request, "to") or datetime.now(UTC).date()
    first = _day(request, "from") or last - min(timedelta(_DAYS - 1), last - date.min)
    if first > last:
        raise InvalidRequest("from: must not be after to")
    if (last - first).days >= _MOST_DAYS:
        raise InvalidRequest(f"from: at most {_MOST_DAYS} days, to included")
    by = request.query_params.get("by") or "day"
    if by not in _BY:
        raise InvalidRequest(f"by: use {' or '.join(_BY)}")
    limit = query_int(request, "limit", 1000, 1, 1000)
    offset = query_int(request, "offset", 0, 0, 2**31 - 1)
    owner = caller(request)
    async with resources(request).pool.connection() as connection:
        found = await usage.in_days(
            connection,
            owner.tenant,
            first,
            last,
            by,
            user_id=owner.user_id,
            limit=limit + 1,
            offset=offset,
        )
    return json_response(
        {
            "from": first,
            "to": last,
            "by": by,
            "total": asdict(found.total),
            "usage": [{by: name, **asdict(used)} for name, used in found.by_name[:limit]],
        },
        headers=page_headers(offset, limit, len(found.by_name)),
    )


def _day(request: Request, name: str) -> date | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        if _DATE.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise InvalidRequest(f"{name}: not a day such as 2026-01-31")
