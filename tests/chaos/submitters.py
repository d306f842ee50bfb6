"""Clients that submit a workload, cancel and answer as it says, and note what was accepted."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tests.chaos.api import Answer, Api
from tests.chaos.ends import Ends
from tests.chaos.followers import Follower
from tests.chaos.workload import Climb, Commands, Thread

ANSWER = "yes"


@dataclass(eq=False)
class Accepted:
    """A run that was accepted: the climb, or its second half after the answer, or the sandboxed commands."""

    what: Climb | Commands
    run_id: str
    resumed: bool = False
    outcome: Any = None
    """What the request that waited for the run answered, if one did."""
    follower: Follower | None = None


@dataclass(eq=False)
class Record:
    """A thread and the runs that were accepted on it, in this order. ``refused`` is empty if all went well."""

    thread: Thread
    thread_id: str
    accepted: list[Accepted] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class Submitters:
    """So many clients side by side; each takes the next thread when all runs of its last one are over."""

    def __init__(self, api: Api, ends: Ends, seed: int) -> None:
        self.records: list[Record] = []
        self._api = api
        self._ends = ends
        self._seed = seed
        self._session = uuid4().hex[:8]  # the database may hold the keys of an earlier session

    async def submit_all(self, threads: Iterator[Thread], width: int) -> None:
        """Return when everything was accepted and has ended."""

        async def client() -> None:
            for thread in threads:
                record = Record(thread, str(uuid4()))
                self.records.append(record)
                await (self._commands(record) if thread.commands else self._climbs(record))

        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(client())

    async def _climbs(self, record: Record) -> None:
        cancels = []
        for climb in record.thread.runs:
            accepted = await self._submit(record, climb, {"input": climb.input()})
            if accepted is None:
                return
            if climb.cancel is not None:
                cancels.append(asyncio.create_task(self._cancel(record, accepted)))
        await asyncio.gather(*cancels)
        await self._ended(record)
        if climb.ask_at is not None:
            await self._submit(record, climb, {"command": {"resume": ANSWER}}, resumed=True)
            await self._ended(record)

    async def _commands(self, record: Record) -> None:
        commands = record.thread.commands
        assert commands is not None
        script = [f"echo {commands.salt} >> log && wc -l < log"] * commands.count
        await self._submit(record, commands, {"input": {"commands": script}})
        await self._ended(record)

    async def _ended(self, record: Record) -> None:
        """Until all runs of the thread are over, and their followers know it."""
        for accepted in record.accepted:
            await self._ends.of(accepted.run_id)
            if accepted.follower is not None:
                await accepted.follower.finished

    async def _submit(
        self, record: Record, what: Climb | Commands, start: dict[str, Any], *, resumed: bool = False
    ) -> Accepted | None:
        body: dict[str, Any] = {
            "assistant_id": "ladder" if isinstance(what, Climb) else "sandboxed",
            "if_not_exists": "create",
            **start,
        }
        path, waits = f"/threads/{record.thread_id}/runs", False
        if isinstance(what, Climb):
            body |= {"stream_mode": list(what.modes), "multitask_strategy": what.strategy}
            if not resumed and what.after_s:
                body["after_seconds"] = what.after_s
            waits = what.how == "wait" and not resumed
        key = f"{self._session}-{what.salt}-{resumed}"
        answer = await (
            self._api.wait(f"{path}/wait", body, key) if waits else self._api.ask("POST", path, body, key)
        )
        if answer.status != 200:
            return self._not_accepted(record, what, answer)
        run_id = answer.headers["content-location"].rpartition("/")[2]
        accepted = Accepted(what, run_id, resumed, answer.json if waits else None)
        record.accepted.append(accepted)
        if isinstance(what, Climb) and what.followed:
            accepted.follower = Follower(self._api, f"{path}/{run_id}/stream", f"{self._seed} {what.salt}")
        return accepted

    def _not_accepted(self, record: Record, what: Climb | Commands, answer: Answer) -> None:
        """409 for a key whose run was undone before the accepting answer came through: it was accepted and is gone."""
        if answer.status == 409 and "was deleted" in answer.json["detail"]:
            record.accepted.append(Accepted(what, ""))
        else:
            record.refused.append(f"{what.salt} was refused with {answer.status}: {answer.json}")

    async def _cancel(self, record: Record, accepted: Accepted) -> None:
        assert isinstance(accepted.what, Climb)
        cancel = accepted.what.cancel
        assert cancel is not None
        await asyncio.sleep(cancel.after_s)
        path = f"/threads/{record.thread_id}/runs/{accepted.run_id}/cancel"
        answer = await self._api.ask("POST", f"{path}?action={cancel.action}&wait={int(cancel.wait)}")
        if answer.status not in (200, 202, 404):
            record.refused.append(f"the cancel of {accepted.what.salt} was refused with {answer.status}")
