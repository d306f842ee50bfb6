"""Is it there, what is it, and can it run anything now?"""

import psycopg
from fastapi import APIRouter
from psycopg_pool import PoolTimeout
from starlette.requests import Request
from starlette.responses import Response

from sandfleet import __version__
from sandfleet.functions.api.requests import resources
from sandfleet.functions.api.responses import json_response
from sandfleet.shared.store.graphs import readiness

router = APIRouter(tags=["system"])

_SILENT_AFTER_S = 10.0  # two heartbeats of an executor, and some


@router.get("/ok")
async def ok() -> Response:
    """The API answers."""
    return json_response({"ok": True})


@router.get("/info")
async def info() -> Response:
    """What this server is, and which optional parts of the dialect it has."""
    return json_response(
        {
            "name": "sandfleet",
            "version": __version__,
            "flags": {"assistants": True, "crons": False, "store": False, "webhooks": False},
        }
    )


@router.get("/system/ready")
async def ready(request: Request) -> Response:
    """200 when runs would be executed now, else 503 with what is missing."""
    missing: list[str] = []
    graphs = executors = 0
    try:
        state = await readiness(resources(request).pool, _SILENT_AFTER_S)
    except (psycopg.Error, PoolTimeout):
        missing.append("the database does not answer, or has no schema yet")
    else:
        graphs, executors = state.graphs, state.executors
        if not graphs:
            missing.append("no graph is registered")
        if not executors:
            missing.append("no executor is alive")
        elif state.pools_without_executor:
            missing.append(f"no executor is alive in: {', '.join(state.pools_without_executor)}")
    return json_response(
        {"ready": not missing, "missing": missing, "graphs": graphs, "executors": executors},
        503 if missing else 200,
        {"retry-after": "1"} if missing else None,
    )
