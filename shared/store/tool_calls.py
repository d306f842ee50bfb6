"""The ledger of a run's tool calls as readers see it. It is written by the executor."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg.rows import class_row

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import Owner


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One execution of a tool call, without its arguments and result."""

    id: UUID
    """The call's own id, the same in each attempt; the tool knows it as its idempotency key."""
    execution: int
    """0, or how often the graph had made this very call before (a retry)."""
    name: str
    tool_call_id: str | None
    message_id: str | None
    checkpoint_ns: str
    attempt: int
    """The attempt of the run that started it last."""
    status: str
    """``started``, ``finished``, ``failed``, or ``orphaned``: broken off, it may or may not have taken effect."""
    error: str | None
    started_at: datetime
    finished_at: datetime | None


async def of_run(pool: Pool, owner: Owner, thread_id: UUID | None, run_id: UUID) -> list[ToolCall]:
    """The tool calls of a run in the order of their start. Raises NotFound."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """select 1 from runs where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s
               and kind = 'run' and (%(thread_id)s::uuid is null or thread_id = %(thread_id)s::uuid)""",
            {**owner._asdict(), "thread_id": thread_id, "run_id": run_id},
        )
        if await cursor.fetchone() is None:
            raise NotFound("Run not found.")
        async with connection.cursor(row_factory=class_row(ToolCall)) as calls:
            await calls.execute(
                """select call_id as id, execution, name, tool_call_id, message_id, ns as checkpoint_ns, attempt, status,
                          error, started_at, finished_at
                   from tool_calls where tenant = %s and user_id = %s and run_id = %s
                   order by started_at, call_id, execution""",
                (*owner, run_id),
            )
            return await calls.fetchall()
