"""Looking at the processes in a sandbox from a command in it."""

from sandfleet.fleet.sandbox.run_sandbox import RunSandbox

# The reader's own shell and its children carry no such argument: the pattern is split over two variables.
_LIST = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null"


async def command_lines(sandbox: RunSandbox) -> list[str]:
    """Command lines of all processes in the sandbox but the agent's and the one that lists them."""
    result = await sandbox.exec(_LIST)
    lines = [line.strip() for line in result.stdout.decode().splitlines()]
    return [
        line
        for line in lines
        if line and "/run/sandfleet/agent" not in line and "/proc/" not in line and line != "tr \\0"
    ]


async def sleepers(sandbox: RunSandbox) -> list[str]:
    """Command lines of the ``sleep`` processes in the sandbox."""
    return [line for line in await command_lines(sandbox) if line.startswith("sleep")]
