"""Looking at the processes in a sandbox from a command in it, and filling its memory."""

from sandfleet.fleet.sandbox.run_sandbox import RunSandbox

# The reader's own shell and its children carry no such argument: the pattern is split over two variables.
_LIST = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null"

# More small processes than the memory that the files leave can hold: the kernel kills some of them.
FILL_MEMORY = (
    "head -c 250000000 /dev/zero > fill; for d in /tmp /dev/shm; do head -c 60000000 /dev/zero > $d/fill; done; "
    "mkfifo /tmp/never; for i in $(seq 150); do (x=$(printf %2000000s); read y <> /tmp/never) & done; "
)
_KILLED = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
UNTIL_ONE_IS_KILLED = f"until cat {_KILLED} 2>/dev/null | grep -q 'oom_kill [1-9]'; do :; done; "


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
