"""``python -m sandfleet.loadtest.provider --port N``: serve until SIGTERM or SIGINT, then exit 0."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import orjson

from sandfleet.loadtest.provider.scripts import Script, ScriptError, parse_script
from sandfleet.loadtest.provider.server import Provider


def _log(event: str, **fields: object) -> None:
    line = {"level": "INFO", "process": "provider", "message": event, **fields}
    print(orjson.dumps(line).decode(), file=sys.stderr, flush=True)


def _scripts(path: Path | None) -> dict[str, Script]:
    if path is None:
        return {}
    value = orjson.loads(path.read_bytes())
    return {name: parse_script(script) for name, script in value.items()}


async def _serve(host: str, port: int, scripts: dict[str, Script]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    provider = Provider(scripts)
    server = await provider.serve(host, port)
    _log("listening", host=host, port=server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()
    for connection in list(provider.connections):
        connection.close()
    _log("stopped")


def main() -> int:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet.loadtest.provider", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="TCP port; 0 takes a free one and logs it")
    parser.add_argument(
        "--script",
        type=Path,
        help="JSON file: an object of scripts by model name; 'default' answers for other names",
    )
    options = parser.parse_args()
    try:
        scripts = _scripts(options.script)
    except (OSError, orjson.JSONDecodeError, ScriptError) as error:
        parser.error(f"--script {options.script}: {error}")
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(options.host, options.port, scripts))
    else:
        uvloop.run(_serve(options.host, options.port, scripts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
