"""Counting the statements that each kind of client sends to the embedded PostgreSQL, by its own log."""

import asyncio
import re
import time
from collections import Counter
from pathlib import Path

import psycopg

_EXECUTED = re.compile(rb"^sf:([^|]*)\|LOG:  (?:statement|execute [^:]*): ", re.MULTILINE)
_SETTINGS = {"log_line_prefix": "sf:%a|", "log_statement": "all"}


async def statements_per_second(admin_url: str, log: Path, seconds: float) -> dict[str, float]:
    """Statements per second by application name, over ``seconds``. ``admin_url`` is a superuser's.

    All statements are logged meanwhile, those that hold transactions together (BEGIN, COMMIT) counted as any other.
    """
    async with await psycopg.AsyncConnection.connect(admin_url, autocommit=True) as connection:
        for name, value in _SETTINGS.items():
            await connection.execute(f"alter system set {name} = '{value}'".encode())
        try:
            await connection.execute("select pg_reload_conf()")
            await asyncio.sleep(1.0)  # every session takes the settings up at its next statement
            begun = time.monotonic()
            before = await asyncio.to_thread(log.read_bytes)
            await asyncio.sleep(seconds)
            text = (await asyncio.to_thread(log.read_bytes))[len(before) :]
            elapsed = time.monotonic() - begun
        finally:
            for name in _SETTINGS:
                await connection.execute(f"alter system reset {name}".encode())
            await connection.execute("select pg_reload_conf()")
    counted = Counter(match.decode() for match in _EXECUTED.findall(text))
    return {name: count / elapsed for name, count in counted.items()}
