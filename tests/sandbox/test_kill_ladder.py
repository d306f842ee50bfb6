"""Time limits and cancelling: whatever a command started is gone, and the sandbox is as good as before."""

import asyncio
import os
import shlex
import shutil
import signal
import uuid
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from sandfleet.fleet import sandbox_agent
from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.bwrap_backend import BwrapBackend
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import SandboxLost
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import DEFAULT, read_templates
from tests.sandbox.conftest import containers
from tests.sandbox.inside import FILL_MEMORY, UNTIL_ONE_IS_KILLED, command_lines, sleepers
from tests.waiting import eventually

STUBBORN = {
    "a child": "sleep 300",
    "a background child that the shell waits for": "sleep 300 & wait",
    "a pipeline": "sleep 300 | sleep 301 | cat",
    "a grandchild in its own session": "setsid sleep 300 & wait",
    "a daemon that forked twice": "(setsid setsid sleep 300 &) ; sleep 301",
    "a daemon with a new environment and our pipes": "(env -i setsid sleep 300 &) ; sleep 301",
    "a child that ignores SIGTERM": "trap '' TERM INT HUP; sleep 300 & wait; wait",
    "a daemon without our pipes": "(setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; sleep 301",
    "a daemon without a trace": "(env -i setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; sleep 301",
    "a daemon with a mark of its own": "(env SANDFLEET_COMMAND=x setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; sleep 301",
    "a daemon with a mark like the agent's": (
        "(env SANDFLEET_COMMAND=$(echo $SANDFLEET_COMMAND | tr 0-9a-f 1-9a-f0) setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; "
        "sleep 301"
    ),
    "a stopped child": "sleep 300 & kill -STOP $!; wait",
}


TEMPLATES = read_templates(Settings())


@pytest.mark.parametrize("command", STUBBORN.values(), ids=STUBBORN.keys())
async def test_a_command_over_its_time_takes_everything_it_started_with_it(sandbox, command):
    """Red when only the shell is killed, or only its process group: each case survives one of those."""
    result = await sandbox.exec(command, timeout_s=0.5)
    assert result.timed_out
    assert await sleepers(sandbox) == []


async def test_a_time_limit_leaves_other_commands_alone(sandbox):
    """Red when the first answer to a time limit is to kill everything in the sandbox."""
    other = asyncio.create_task(sandbox.exec("until [ -e go ]; do sleep 0.02; done; echo well", timeout_s=60))
    assert (await sandbox.exec("sleep 300 & wait", timeout_s=0.5)).timed_out
    await sandbox.write_file("go", b"")
    assert (await other).stdout == b"well\n"


async def test_a_time_limit_leaves_earlier_background_processes_alone(sandbox):
    """Red when every orphan is taken for the command's own."""
    await sandbox.exec(
        "(setsid sleep 400 &); (env -i setsid sleep 401 </dev/null >/dev/null 2>&1 &); sleep 0.1"
    )
    assert (await sandbox.exec("sleep 300 & wait", timeout_s=0.5)).timed_out
    assert sorted(await sleepers(sandbox)) == ["sleep 400", "sleep 401"]


async def test_a_time_limit_leaves_what_later_commands_started_alone(sandbox):
    """Red when no orphan's mark counts: a server of one command would go with another's time limit."""
    limited = asyncio.create_task(sandbox.exec("touch began; sleep 300", timeout_s=5))
    await sandbox.exec(
        "until [ -e began ]; do sleep 0.02; done; (setsid sleep 400 </dev/null >/dev/null 2>&1 &)"
    )
    assert (await limited).timed_out
    assert await sleepers(sandbox) == ["sleep 400"]


async def test_output_before_the_time_limit_is_kept(sandbox):
    for limit_s in (0.5, 5, 50):  # as long as this machine needs for the first word
        result = await sandbox.exec("echo early; sleep 300", timeout_s=limit_s)
        if result.stdout:
            break
    assert (result.timed_out, result.stdout) == (True, b"early\n")


async def test_a_background_process_does_not_hold_up_its_command(sandbox):
    """Red when the end of output is awaited: the background process holds the pipes for 300 s."""
    result = await sandbox.exec("sleep 300 & echo started", timeout_s=60)
    assert (result.timed_out, result.exit_code, result.stdout) == (False, 0, b"started\n")


async def test_a_cancelled_exec_kills_the_command(sandbox):
    """Red when the host does not notice the dropped request, or kills only the shell."""
    await sandbox.exec("true")
    running = asyncio.create_task(sandbox.exec("setsid sleep 300 & sleep 301", timeout_s=120))

    async def started():
        return len(await sleepers(sandbox)) == 2

    async def gone():
        return await sleepers(sandbox) == []

    await eventually(started, what="the command runs")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(gone, what="its processes are gone")


async def test_a_process_that_forks_away_is_killed(sandbox):
    """Red when a look that missed the child of a process that ended meanwhile counts as complete."""
    runner = "import os\nwhile True:\n if os.fork(): os._exit(0)"
    result = await sandbox.exec(f"python3 -c '{runner}' & sleep 300", timeout_s=0.5)
    assert result.timed_out
    assert await command_lines(sandbox) == []


async def test_what_the_tree_kill_cannot_get_everything_else_goes_with(tmp_path):
    """Red without the second rung. An agent whose looks at the tree find nothing stands for one that is outrun."""
    source = shutil.copytree(Path(sandbox_agent.__file__).parent, tmp_path / "source")
    with (source / "tree.py").open("a") as module:
        module.write("\n\nTree.members = lambda self: (set(), False)\n")
    backend = BwrapBackend(TEMPLATES)
    fence = Fence(RunKey("acme", "ada", uuid.uuid4()), 1)
    agent = AgentFiles(tmp_path / "agent", source)
    sandbox = await Sandbox.launch(
        backend, fence.key, tmp_path / "sandboxes", agent, TEMPLATES.templates[DEFAULT]
    )
    serving = asyncio.create_task(sandbox.serve())
    try:
        spec = {"shell": "setsid sleep 300 & sleep 301", "timeout_s": 0.2, "output_bytes": 1000}
        events = [event async for event in sandbox.exec(fence, spec, None)]
        assert events[-1][1]["timed_out"]
        assert events[-1][1]["kill_rung"] == 2
        spec = {"shell": "cat /proc/[0-9]*/cmdline", "timeout_s": 120, "output_bytes": 1000}
        events = [event async for event in sandbox.exec(fence, spec, None)]
        assert b"sleep" not in events[0][1]
    finally:
        await sandbox.destroy()
        await serving


async def test_a_fork_bomb_is_bounded_and_killed(sandbox):
    """Red without a limit of processes: the machine suffers, and this sandbox cannot go on."""
    result = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 300", timeout_s=2)
    assert result.timed_out or result.signal == signal.SIGKILL
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
    assert len(await command_lines(sandbox)) < 5


async def test_no_zombies_stay(sandbox):
    """Red when PID 1 reaps only the commands it started: orphans become its children."""
    await sandbox.exec("for i in $(seq 20); do (setsid true &); done")

    async def none():
        result = await sandbox.exec("cat /proc/[0-9]*/stat 2>/dev/null")
        return not [
            line for line in result.stdout.decode().splitlines() if line.rpartition(")")[2].split()[0] == "Z"
        ]

    await eventually(none, what="no zombies")


async def test_thousands_of_orphans_are_reaped_as_they_come(docker_sandbox):
    """Red when PID 1 reaps only its own: 256 zombies are all the processes that the sandbox may have."""
    program = (
        "import os\nn = 0\nwhile n < 3000:\n try: pid = os.fork()\n except BlockingIOError: continue\n"
        " if pid == 0:\n  try: os.fork()\n  except BlockingIOError: os._exit(1)\n  os._exit(0)\n"
        " n += os.waitpid(pid, 0)[1] == 0\nprint(n)"
    )
    result = await docker_sandbox.exec(["python3", "-c", program], timeout_s=110)
    assert (result.stdout, result.exit_code) == (b"3000\n", 0)


async def test_a_gigabyte_of_output_costs_nothing_but_time(docker_host, docker_sandbox):
    """Red when output beyond the limit is kept anywhere, or blocks the command or the next one."""
    await docker_sandbox.exec("true")
    assert docker_host.process is not None
    process = psutil.Process(docker_host.process.pid)
    before = process.memory_info().rss
    flood = asyncio.create_task(docker_sandbox.exec("yes | head -c 1000000000", timeout_s=110))
    assert (await docker_sandbox.exec("echo quick", timeout_s=110)).stdout == b"quick\n"
    result = await flood
    assert (result.exit_code, result.truncated) == (0, True)
    assert result.dropped_bytes > 990_000_000
    assert process.memory_info().rss - before < 64 * 1024 * 1024
    limit = await docker_sandbox.exec("grep VmHWM /proc/1/status")
    assert int(limit.stdout.split()[1]) < 64 * 1024  # KiB


async def test_a_process_may_not_open_files_without_end(docker_sandbox):
    """Red without the limit of descriptors; the agent has its own and goes on."""
    program = "n = []\ntry:\n while True: n.append(open('/dev/null'))\nexcept OSError as e: print(len(n) < 4096, e.errno)"
    result = await docker_sandbox.exec(["python3", "-c", program])
    assert result.stdout == b"True 24\n"
    assert (await docker_sandbox.exec("ulimit -n 9999; ulimit -n")).stdout == b"4096\n"


async def test_memory_that_runs_out_kills_the_command_and_not_the_sandbox(docker_sandbox):
    """Red without a memory limit, or when the kernel may pick the agent: then the sandbox would be lost."""
    await docker_sandbox.write_file("kept", b"here")
    result = await docker_sandbox.exec(["python3", "-c", "x = bytearray(2_000_000_000)"])
    assert result.signal == signal.SIGKILL
    assert result.out_of_memory
    assert result.memory_limit_bytes == 512 * 1024 * 1024
    assert result.memory_peak_bytes is not None
    assert 0.9 * result.memory_limit_bytes < result.memory_peak_bytes <= result.memory_limit_bytes
    assert await docker_sandbox.read_file("kept") == b"here"
    assert not (await docker_sandbox.exec("true")).out_of_memory


TOO_MUCH = """python3 -c "x = b'x' * 2_000_000_000" """
ORPHAN = f"({TOO_MUCH} & echo $! > pid); while kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done"
BESIDE = "touch up; until [ -e go ]; do sleep 0.05; done; "


@pytest.mark.parametrize("hit", ["exec " + TOO_MUCH, TOO_MUCH + "; echo done", ORPHAN])
@pytest.mark.parametrize(("then", "told"), [("", False), (TOO_MUCH + "; true", True)])
async def test_who_was_killed_for_memory_is_told_and_not_who_ran_beside(docker_sandbox, hit, then, told):
    """Red for the neighbour if a kill in the sandbox is everybody's, or if only one that the agent saw is anybody's."""
    async with asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(docker_sandbox.exec(BESIDE + then, timeout_s=600))
        await eventually(lambda: _is_there(docker_sandbox, "up"))
        assert (await docker_sandbox.exec(hit, timeout_s=600)).out_of_memory
        await docker_sandbox.write_file("go", b"")
    result = beside.result()
    assert (result.exit_code, result.out_of_memory) == (0, told)


async def test_who_kills_itself_takes_no_kill_from_who_was_hit(docker_sandbox):
    """Red when whatever dies of a SIGKILL after memory ran out is the one that the kernel took."""
    killing = "touch up; until [ -e killed ]; do sleep 0.05; done; kill -9 $$"
    async with asyncio.TaskGroup() as tasks:
        small = tasks.create_task(docker_sandbox.exec(killing, timeout_s=600))
        await eventually(lambda: _is_there(docker_sandbox, "up"))
        hit = tasks.create_task(docker_sandbox.exec(f"{TOO_MUCH}; touch killed; {BESIDE}", timeout_s=600))
        assert (await small).signal == 9
        await docker_sandbox.write_file("go", b"")
    assert hit.result().out_of_memory


SPARED = """
import time
x = b"x" * 200_000_000
open("/proc/self/oom_score_adj", "w").write("0")  # so the kernel takes the other one
open("up", "w")
time.sleep(600)
"""


async def test_a_large_command_that_the_agent_kills_takes_no_kill_from_who_was_hit(docker_sandbox):
    """Red when what the agent has killed is taken for what the kernel took."""
    large = f"echo $$ > pid; exec python3 -c {shlex.quote(SPARED)}"
    killing = asyncio.create_task(docker_sandbox.exec(large, timeout_s=600))
    await eventually(lambda: _is_there(docker_sandbox, "up"))
    hit = asyncio.create_task(docker_sandbox.exec(f"{TOO_MUCH}; touch killed; {BESIDE}", timeout_s=600))
    await eventually(lambda: _is_there(docker_sandbox, "killed"))
    killing.cancel()

    async def dead():
        return (await docker_sandbox.exec("kill -0 $(cat pid)")).exit_code != 0

    await eventually(dead)
    await docker_sandbox.write_file("go", b"")
    assert (await hit).out_of_memory
    assert killing.cancelled()


async def _is_there(sandbox, name):
    return (await sandbox.exec(["test", "-e", name])).exit_code == 0


async def test_many_small_processes_that_fill_memory_do_not_kill_the_agent(docker_sandbox):
    """Red without the raised oom_score_adj of commands: the agent is bigger than each of these."""
    command = f"{FILL_MEMORY}{UNTIL_ONE_IS_KILLED}kill -9 -1; exit 3"
    result = await docker_sandbox.exec(command, timeout_s=600)
    assert (result.exit_code, result.out_of_memory) == (3, True)
    assert (await docker_sandbox.exec("ls")).stdout == b"fill\n"


async def test_commands_that_take_all_cpu_time_are_killed_in_time(own_host):
    """Red without the niceness of commands, by which the agent gets more than a 200th of what CPU there is.

    And without a whole CPU lent for the kill: 200 processes need longer than the agent waits to die of a twentieth.
    """
    host = own_host(SANDFLEET_SANDBOX_CPUS="0.05")
    await host.start()
    spin = "for i in $(seq 200); do while :; do :; done & done; wait"
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await host.sandbox(client)
        assert (await sandbox.exec(spin, timeout_s=5)).timed_out
        assert await command_lines(sandbox) == []


async def test_a_sandbox_whose_agent_does_not_answer_is_killed_from_outside(docker_host, docker_sandbox):
    """Red when the host trusts the agent with the time limit: the agent is stopped here."""
    await docker_sandbox.exec("true")
    (container,) = await containers(docker_host)
    async with Engine(docker_host.docker_host) as engine:
        pid = (await engine.call("GET", f"/containers/{container['Id']}/json"))["State"]["Pid"]
    running = asyncio.create_task(docker_sandbox.exec("sleep 300", timeout_s=1))

    def sleeping():
        inside = psutil.Process(pid).children(recursive=True)
        return any("sleep 300" in " ".join(process.cmdline()) for process in inside)

    await eventually(sleeping, what="the command runs")
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandboxLost, match="could not be killed"):
        await running
    assert (await docker_sandbox.exec("echo anew")).stdout == b"anew\n"


async def test_a_full_workspace_is_an_error_of_the_command(docker_sandbox):
    """Red without the size of the tmpfs: the machine's memory would fill instead."""
    result = await docker_sandbox.exec("head -c 1000000000 /dev/zero > fill; echo $?; df -m . | tail -1")
    assert result.stdout.startswith(b"1\n")
    assert b"No space left" in result.stderr
    assert (await docker_sandbox.exec("rm fill; echo fine > file; cat file")).stdout == b"fine\n"


async def test_the_number_of_files_is_bounded(docker_sandbox):
    """Red without nr_inodes: empty files take kernel memory that the size of a tmpfs does not count."""
    program = (
        "n=0\ntry:\n while True: open(f'f{n}', 'w').close(); n += 1\nexcept OSError as e: print(n, e.errno)"
    )
    result = await docker_sandbox.exec(["python3", "-c", program])
    count, errno = map(int, result.stdout.split())
    assert (count < 65_536, errno) == (True, 28)
