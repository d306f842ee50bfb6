"""Looking at the processes in a sandbox from a command in it, and filling its memory."""

from sandfleet.fleet.sandbox.run_sandbox import RunSandbox

# The reader's own shell and its children carry no such argument: the pattern is split over two variables.
_LIST = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null"

# More small processes than the memory that the files leave can hold: the kernel kills some of them. All are there before any
# of them fills its memory, and nothing forks from then on: a fork may fail where memory or processes run out, and the shell
# that cannot fork ends (exit code 254).
FILL_MEMORY = (
    "head -c 250000000 /dev/zero > fill; for d in /tmp /dev/shm; do head -c 60000000 /dev/zero > $d/fill; done; "
    "mkfifo /tmp/go /tmp/never; exec 3<> /tmp/go; "
    "for i in {1..150}; do (read y <&3; printf -v x %2000000s; read y <> /tmp/never) & done; "
    "for i in {1..150}; do echo; done >&3; "
)
_KILLED = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
UNTIL_ONE_IS_KILLED = (
    f"killed() {{ for f in {_KILLED}; do [ -r $f ] && while read -r what n; do "
    "[ $what = oom_kill ] && [ $n -gt 0 ] && return 0; done < $f; done; return 1; }; until killed; do :; done; "
)


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
