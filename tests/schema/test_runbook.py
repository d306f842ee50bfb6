"""What docs/runbook.md has a person on call type into psql works at the newest schema."""

import re
from pathlib import Path

import psycopg

STATEMENTS = re.findall(r"`(select [^`]+)`", (Path(__file__).parents[2] / "docs" / "runbook.md").read_text())


async def test_each_statement_of_the_runbook_can_be_executed(database: str) -> None:
    """Red when a column that it names is renamed, or a pool's and a host's figures move to another table."""
    assert len(STATEMENTS) >= 8
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        for statement in STATEMENTS:
            # PID is for the person to fill in.
            await connection.execute(statement.replace("(PID)", "(-1)").encode())
