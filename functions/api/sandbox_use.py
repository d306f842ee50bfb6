"""Sandboxes without a run: made, used, and made anew when they were lost.

PostgreSQL says which generation counts and where it is; every request to a host carries a token for it. When a generation is
lost, the next one is made at once, and one call fails with ``sandbox_lost`` that says what is in it.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sandfleet.functions.api.host_ask import Ask
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.sandbox_errors import (
    HostRefused,
    SandboxLost,
    SnapshotTooLarge,
    TooManySandboxes,
)
from sandfleet.shared import sandbox_token
from sandfleet.shared.errors import Conflict, HostAway, HostUnavailable, InvalidRequest, NoRoom, NotFound
from sandfleet.shared.ids import Fence, Owner, RunKey, new_id
from sandfleet.shared.store import sandboxes
from sandfleet.shared.store.sandboxes import Sandbox, Wish
from sandfleet.shared.store.snapshots import Snapshot

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)
_TOKEN_S = 60.0  # a token is checked when a request begins; what goes on needs no other
_PATIENCE_S = 5.0  # a host that restarts costs a pause
_PAUSE_S = 0.25
_ENDS_S = 30.0  # a host ends what goes on in a sandbox whose time is over; its kill ladder takes less
_REMOVE_S = 2.0  # the host notices by itself that nobody owns the sandbox any more
_TRIES = 3  # to make a sandbox on a host where it dies before it has begun
MISSING = "Sandbox not found, or its time is over."
NO_SNAPSHOT = "Snapshot not found, or its time is over."
_NO_HOST = "No sandbox host is there. Start one (python -m sandfleet.fleet.host), then try again."
_FULL = "No sandbox host has room. Try again when a sandbox has ended."
_GONE = "The sandbox was lost: its host is gone."
_RESTARTED = "The sandbox was lost: its host has restarted."
_DIED = "The sandbox died before it had begun, again and again. Try again; if that goes on, look at the sandbox host's log."
_NOT_TAKEN = "The sandbox was begun anew while this was sent, and nothing of it was taken. Look at the sandbox, then send it again."
_KEY_REUSED = "This Idempotency-Key was used for a different request. Use a new key for a new request."
_NOT_BEGUN = "The snapshot that the sandbox was to begin with is gone, or its host keeps none."


async def create(found: Resources, owner: Owner, wish: Wish) -> Sandbox:
    """Make a sandbox, or, with an Idempotency-Key that has made one, that one.

    Raises InvalidRequest and NotFound for what was wished, Conflict for a key that stands for something else or whose sandbox
    has ended, TooManySandboxes, NoRoom and HostUnavailable.
    """
    key = RunKey(*owner, new_id())
    own = await found.hosts.own()
    try:
        outcome, detail = await sandboxes.create(
            found.pool, key, wish, own, found.settings.tenant_max_sandboxes
        )
        if outcome == "placed":
            try:
                return await Use(found, key).ready()
            except SandboxLost:  # its caller has none yet that could be lost
                raise NotFound(_NOT_BEGUN) from None
    except BaseException as error:
        if wish.idempotency_key is None or not isinstance(error, asyncio.CancelledError):
            # Whoever cancels once more does not end it.
            await asyncio.shield(found.spawn(_take_back(found, key, wish.idempotency_key)))
        raise  # one with a key stays for a caller who was cut off and asks again
    if outcome == "replayed":
        assert detail is not None
        return await _again(found, RunKey(*owner, UUID(detail)))
    if outcome == "key_reused":
        raise Conflict(_KEY_REUSED)
    if outcome == "limit":
        raise TooManySandboxes(
            f"The tenant has {detail} sandboxes, as many as it may have. Delete one, or wait until one's time is over.",
            retry_after_s=10,
        )
    if outcome == "no_snapshot":
        raise NotFound(NO_SNAPSHOT)
    if outcome == "no_template":
        raise InvalidRequest(f"template: there is none of this name, only {detail}")
    if outcome == "too_long":
        raise InvalidRequest(f"ttl_s: sandboxes of this template live {float(detail or 0):g} s at most")
    _check_placed(outcome)
    raise AssertionError(outcome)


async def made_by(
    found: Resources, owner: Owner, key: str | None, request_hash: bytes | None
) -> Sandbox | None:
    """The sandbox that an Idempotency-Key has made, for a request that would do something else before it comes to that; None:
    there is none yet. Raises Conflict as `create` does."""
    used = None if key is None else await sandboxes.made_by(found.pool, owner, key)
    if used is None:
        return None
    sandbox_id, stands_for = used
    if stands_for != request_hash:
        raise Conflict(_KEY_REUSED)
    return await _again(found, RunKey(*owner, sandbox_id))


async def _again(found: Resources, key: RunKey) -> Sandbox:
    try:
        return await Use(found, key).ready()
    except NotFound:
        raise Conflict("The sandbox that this Idempotency-Key had created has ended.") from None


async def live(found: Resources, key: RunKey, ttl_s: float) -> Sandbox:
    """Let a sandbox end so many seconds from now. Raises NotFound, InvalidRequest, and HostUnavailable."""
    outcome, left_s = await sandboxes.live(found.pool, key, ttl_s)
    if outcome == "too_long":
        raise InvalidRequest(
            f"ttl_s: the lifetime of this sandbox's template leaves {max(0.0, left_s or 0.0):.0f} s"
        )
    if outcome == "no_template":
        raise HostUnavailable(_NO_HOST, retry_after_s=5)
    row = await sandboxes.get(found.pool, key)
    if row is None:
        raise NotFound(MISSING)
    return row


async def _take_back(found: Resources, key: RunKey, idempotency_key: str | None) -> None:
    """Give the room free of a sandbox that could not be made."""
    try:
        await sandboxes.take_back(found.pool, key, idempotency_key)
    except Exception as error:
        _log.warning("a sandbox that was not made stays until its time is over: %s", type(error).__name__)


async def delete(found: Resources, key: RunKey) -> None:
    """End a sandbox. Raises NotFound."""
    row = await sandboxes.get(found.pool, key)
    if row is None or not await sandboxes.remove(found.pool, key):
        raise NotFound(MISSING)
    try:
        async with asyncio.timeout(_REMOVE_S):
            await Use(found, key).tell(row, Ask("DELETE", "/sandbox"))
    except (HostUnavailable, HostRefused, TimeoutError):
        return


async def restore(found: Resources, key: RunKey, snapshot: Snapshot) -> Sandbox:
    """Begin a sandbox anew with a snapshot of its owner's. Raises NotFound, Conflict, SnapshotTooLarge, and what keeps it from
    being made."""
    row = await sandboxes.get(found.pool, key)
    if row is None:
        raise NotFound(MISSING)
    most = await sandboxes.workspace_bytes(found.pool, row.template)
    if most is not None and snapshot.content_bytes > most:
        raise SnapshotTooLarge(
            f"The files of the snapshot are {snapshot.content_bytes} bytes, and the sandbox's workspace holds {most}. Fork it "
            "into a sandbox of a larger template."
        )
    if not await sandboxes.restore(found.pool, Fence(key, row.generation), snapshot.snapshot_id):
        raise Conflict("The sandbox was lost or begun anew meanwhile. Look at it, then try again.")
    return await Use(found, key).ready()


def _check_placed(outcome: str) -> None:
    if outcome == "full":
        raise NoRoom(_FULL, retry_after_s=5)
    if outcome == "no_host":
        raise HostUnavailable(_NO_HOST, retry_after_s=5)


class Use:
    """One request's use of a sandbox. ``generation`` is the one that its caller knows, if it says so."""

    def __init__(self, found: Resources, key: RunKey, generation: int | None = None) -> None:
        self._found = found
        self._key = key
        self._generation = generation

    async def ready(self) -> Sandbox:
        """The sandbox, made if it is not. Raises NotFound, InvalidRequest for a generation that was never there, SandboxLost if
        the caller has to hear of a loss, and what keeps it from being made."""
        row = await self._row()
        if self._generation is not None and not 1 <= self._generation <= row.generation:
            raise InvalidRequest(
                f"X-Sandbox-Generation: the sandbox is in generation {row.generation} and has had none of this number"
            )
        if row.known is None:
            row = await self._make(row)
        if self._generation not in (None, row.generation) or not row.told:
            await sandboxes.told(self._found.pool, Fence(self._key, row.generation))
            raise _lost(row)
        return row

    async def open(self, ask: Ask) -> "httpx.Response":
        """Ask the sandbox's host; the response's body is still to be read, and the caller closes it.

        Raises as `ready` does, HostRefused for what the sandbox cannot do, HostUnavailable, and Conflict if the sandbox was
        begun anew while a body was sent that cannot be sent again.
        """
        return (await self.open_at(ask))[1]

    async def open_at(self, ask: Ask) -> "tuple[int, httpx.Response]":
        """As `open`, with the generation that was asked."""
        patient_until = time.monotonic() + _PATIENCE_S
        while True:
            row = await self.ready()
            try:
                if row.host_id is None or row.address is None:
                    raise HostAway(_GONE)
                return row.generation, await self._send(row, ask)
            except HostAway:
                if row.address is not None and row.host_here:
                    if not ask.repeatable or time.monotonic() > patient_until:
                        raise
                    await asyncio.sleep(_PAUSE_S)
                    continue
                raise await self.lost(row.generation, _GONE) from None
            except HostRefused as refused:
                if refused.code == "superseded" and time.monotonic() < patient_until:
                    if not ask.repeatable:
                        raise Conflict(_NOT_TAKEN) from None
                    await asyncio.sleep(_PAUSE_S)
                    continue
                raise await self.explained(row.generation, refused) from None

    async def json(self, ask: Ask) -> dict[str, Any]:
        """As `open`, with the whole answer."""
        return await self._found.hosts.whole(await self.open(ask))

    async def explained(self, generation: int, refused: HostRefused) -> Exception:
        """What a host's refusal means to the caller."""
        if refused.code == "sandbox_lost":
            return await self.lost(generation, refused.message)
        if refused.code == "no_sandbox":
            return await self.lost(generation, _RESTARTED)
        return _distrusted(refused) if refused.status in (401, 403) else refused

    async def lost(self, generation: int, reason: str) -> Exception:
        """A generation is gone: make the next one, and say what is in it."""
        await sandboxes.lose(self._found.pool, Fence(self._key, generation), reason)
        try:
            return _lost(
                await Use(self._found, self._key).ready()
            )  # another request has told of it; so does this one
        except (SandboxLost, NotFound, HostUnavailable, HostRefused) as error:
            return error

    async def tell(self, row: Sandbox, ask: Ask) -> None:
        """Ask the host of a sandbox that may be gone already."""
        if row.host_id is not None:
            response = await self._send(row, ask)
            await response.aclose()

    async def _row(self) -> Sandbox:
        row = await sandboxes.get(self._found.pool, self._key)
        if row is None:
            raise NotFound(MISSING)
        return row

    async def _send(self, row: Sandbox, ask: Ask) -> "httpx.Response":
        assert row.host_id is not None
        ask = replace(ask, silence_s=min(ask.silence_s, row.expires - row.now + _ENDS_S))
        return await self._found.hosts.open(row.host_id, row.remote, self._token(row), ask)

    def _token(self, row: Sandbox) -> str:
        secret = self._found.settings.host_secret
        if not secret:
            raise HostUnavailable(
                "Sandboxes are not set up: SANDFLEET_HOST_SECRET is empty. Give the API the key that its hosts have."
            )
        expires_at = min(row.now + _TOKEN_S, row.expires)
        return sandbox_token.sign(secret, Fence(self._key, row.generation), expires_at)

    async def _make(self, row: Sandbox) -> Sandbox:
        """Make the sandbox's generation on a host that takes it."""
        fence = Fence(self._key, row.generation)
        own = await self._found.hosts.own()
        refused: list[str] = []
        died = 0
        why: Exception | None = None
        while True:
            placed = await sandboxes.place(self._found.pool, fence, own, refused)
            if placed.outcome == "superseded":
                row = await self._row()
                return row if row.known is not None else await self._make(row)
            if why is not None and placed.outcome != "placed":
                raise why
            _check_placed(placed.outcome)
            assert placed.host_id is not None
            try:
                acquired = await self._found.hosts.json(
                    placed.host_id,
                    placed.remote,
                    self._token(row),
                    Ask("PUT", "/sandbox", json={"template": row.template, "anew": True}),
                )
                break
            except HostUnavailable as error:
                why = error
            except HostRefused as error:
                if error.status == 401:
                    raise _distrusted(error) from None
                if error.code == "sandbox_lost":  # it died before it had begun, and nobody has seen it
                    why = HostUnavailable(_DIED, retry_after_s=1)
                    if (died := died + 1) < _TRIES:
                        continue
                elif error.code not in ("no_room", "sandbox_host_unavailable", "template_unavailable"):
                    raise
                else:
                    why = NoRoom(_FULL, retry_after_s=5) if error.code == "no_room" else error
            refused.append(placed.host_id)
        restored = acquired["restored"] and UUID(acquired["restored"]["snapshot_id"])
        if row.begins_with is not None and restored is None and row.lost is None:
            await sandboxes.lose(self._found.pool, fence, _NOT_BEGUN)
        elif await sandboxes.made(self._found.pool, fence, acquired["sandbox_id"], restored):
            return await self._row()
        row = await self._row()
        return row if row.known is not None else await self._make(row)


def _distrusted(refused: HostRefused) -> HostUnavailable:
    return HostUnavailable(
        f"The sandbox's host refused the API's token ({refused.code}): API and hosts need one SANDFLEET_HOST_SECRET."
    )


def _lost(row: Sandbox) -> SandboxLost:
    return SandboxLost(row.lost or _RESTARTED, row.generation, row.restored)
