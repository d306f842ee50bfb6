"""Coverage-guided fuzzing of all that a sandbox can send its host: ``make fuzz SECONDS=120``.

An input's first byte says what it is for: a hello, a result or a failure, lines of an answer, the first message of TLS,
or a whole connection under an agent. Anything but the one error that each may raise, and an input that takes 5 s or
1 GB, ends it with status 77 or 70, and is kept in FOLDER beside the inputs that found new paths.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["sandfleet.fleet"]):
    from sandfleet.fleet.host import agent_link, results
    from sandfleet.fleet.host.agent_link import AgentLink, Operation
    from sandfleet.fleet.host.answers import Answers
    from sandfleet.fleet.host.results import ProtocolError
    from sandfleet.fleet.host.tls_name import ClientHello, NotTls
    from sandfleet.fleet.sandbox.errors import OperationRefused, SandboxLost
    from sandfleet.fleet.sandbox_agent import wire

SECRET = "5" * 32
LOOP = asyncio.new_event_loop()
QUESTIONS = sorted(results._FIELDS)


class Nowhere(asyncio.Transport):
    """Takes what the host sends."""

    def write(self, data: Any) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return True

    def abort(self) -> None:
        pass


def connected(data: bytes) -> AgentLink:
    """A link to an agent that says this, and hangs up."""
    reader = asyncio.StreamReader(loop=LOOP, limit=wire.MAX_BODY)
    reader.feed_data(data)
    reader.feed_eof()
    protocol = asyncio.StreamReaderProtocol(reader, loop=LOOP)
    return AgentLink(reader, asyncio.StreamWriter(Nowhere(), protocol, reader, LOOP))


def storable(found: Any) -> None:
    """What was let in must be JSON and UTF-8: it goes on to callers."""
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


def hello(data: bytes) -> None:
    async def greet() -> None:
        await connected(data)._hello(SECRET, 30.0, again=True)

    with suppress(ProtocolError):
        LOOP.run_until_complete(greet())


def result(data: bytes) -> None:
    with suppress(ProtocolError):
        storable(results.result(QUESTIONS[data[0] % len(QUESTIONS)] if data else QUESTIONS[0], data[1:]))


def failure(data: bytes) -> None:
    with suppress(ProtocolError):
        storable(results.failure(data))


def lines(data: bytes) -> None:
    asked = sorted(results._LINES)
    found = results.Lines(asked[data[0] % len(asked)] if data else asked[0])
    with suppress(ProtocolError):
        for at in range(1, len(data), 40):
            found.feed(data[at : at + 40])
        storable(found.found)


def first_of_tls(data: bytes) -> None:
    reader = ClientHello()
    with suppress(NotTls):
        for at in range(0, len(data), 100):
            if (name := reader.feed(data[at : at + 100])) is not None:
                assert name.isascii()
                assert name == name.lower()
                return


async def _read(operation: Operation) -> None:
    with suppress(SandboxLost, OperationRefused, ProtocolError):
        if operation.asked in results._LINES:
            storable(await Answers().read(operation))
        else:
            while await operation.take() is not None:
                pass
        storable(operation.result)


def connection(data: bytes) -> None:
    async def play() -> None:
        link = connected(data[4:])
        readers = []
        for number in data[:4]:
            kind, do = QUESTIONS[number % len(QUESTIONS)]
            readers.append(asyncio.create_task(_read(link.begin(kind, {"do": do}, 1000))))
        link.close(await link.serve())
        await asyncio.gather(*readers)

    LOOP.run_until_complete(play())


TARGETS: list[Callable[[bytes], None]] = [hello, result, failure, lines, first_of_tls, connection]


def one(data: bytes) -> None:
    """What the fuzzer calls."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds() -> list[bytes]:
    """Good examples of each, for the fuzzer to begin with."""
    greeting = json.dumps({"newest": 3, "oldest": 3, "uid": 1, "secret": SECRET}).encode()
    exit_ = json.dumps({"exit_code": 0, **dict.fromkeys(results._COMMAND, 0)}).encode()
    entry = (
        json.dumps({"name": "a", "kind": "file", "size": 1, "mode": 420, "modified_s": 1}).encode() + b"\n"
    )
    failed = b'{"code": "not_found", "message": "\\ud800"}'
    name = b"\x00\x00\x00\x10\x00\x0e\x00\x00\x0ba.example.b"
    message = b"\x03\x03" + bytes(32) + b"\x00\x00\x02\x13\x01\x01\x00" + len(name).to_bytes(2, "big") + name
    client_hello = b"\x01" + len(message).to_bytes(3, "big") + message
    frames = (
        wire.pack(wire.STDOUT, 1, b"x") + wire.pack(wire.CREDIT, 1, bytes(4)) + wire.pack(wire.DONE, 1, exit_)
    )
    exec_ = QUESTIONS.index((wire.EXEC, ""))
    found = [
        wire.pack(wire.HELLO, 0, greeting),
        bytes([exec_]) + exit_,
        failed,
        b"\0" + entry,
        b"\x16\x03\x01" + len(client_hello).to_bytes(2, "big") + client_hello,
        bytes([exec_] * 4) + frames + wire.pack(wire.FAIL, 2, failed) + wire.pack(wire.DATA, 3, entry),
    ]
    return [bytes([kind]) + data for kind, data in enumerate(found)]


def words() -> str:
    """What the fuzzer may put in: names of fields and codes, and what is no text."""
    fields = {name for each in (*results._FIELDS.values(), *results._LINES.values()) for name in each}
    said = [
        f'"{name}"'
        for name in sorted({*fields, *results.CODES, "newest", "oldest", "secret", "code", "message"})
    ]
    said += ["\\ud800", "\\u0000", "NaN", "1e999", "9" * 30, "null", "true", "[[", "{}", "superseded"]
    return "".join('"{}"\n'.format(word.replace("\\", "\\\\").replace('"', '\\"')) for word in said)


def main() -> None:
    """Fuzz for some time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--folder", type=Path, default=Path(".sandfleet/fuzz"))
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (asked.folder / f"seed-{number}").write_bytes(seed)
    dictionary = asked.folder.with_suffix(".words")
    dictionary.write_text(words())
    agent_link._PACE_S = 0.0
    options = [
        "-max_len=4096",
        "-timeout=5",
        "-rss_limit_mb=1024",
        f"-dict={dictionary}",
        f"-artifact_prefix={asked.folder}/",
    ]
    atheris.Setup([sys.argv[0], *options, f"-max_total_time={asked.seconds}", str(asked.folder)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
