"""Identifiers: time-ordered UUIDs for threads and runs, stable ones for what a deployment makes."""

import uuid
from typing import NamedTuple

import uuid_utils

_GRAPH_NAMESPACE = uuid.UUID("6ba7b821-9dad-11d1-80b4-00c04fd430c8")


class Owner(NamedTuple):
    """Who a thing belongs to. Part of every key in the store."""

    tenant: str
    user_id: str


class RunKey(NamedTuple):
    """The full key of a run: its owner and its id."""

    tenant: str
    user_id: str
    run_id: uuid.UUID

    @property
    def owner(self) -> Owner:
        return Owner(self.tenant, self.user_id)


class Fence(NamedTuple):
    """What every write of an executor names: the run and the attempt that owns it."""

    key: RunKey
    attempt: int


def new_id() -> uuid.UUID:
    """A new UUIDv7. Its time part orders ids for readers only; nothing is decided by it."""
    return uuid.UUID(bytes=uuid_utils.uuid7().bytes)


def graph_assistant_id(graph_id: str) -> uuid.UUID:
    """The id of the assistant that every deployment has for a graph: the same on each start."""
    return uuid.uuid5(_GRAPH_NAMESPACE, graph_id)
