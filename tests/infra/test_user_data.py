"""What a Docker host runs at its start, run here: on a copy of the few folders that it writes to, with programs that only say
that they were called. It makes scripts and units; the scripts are run, too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.reading import each, found

PROGRAM = """#!/bin/bash
name=${0##*/}
echo "$name $*" >>"$CALLS"
case "$name $*" in
  *api/token*) echo token ;;
  *meta-data/instance-id*) echo i-1 ;;
  *meta-data/local-ipv4*) echo 10.0.1.2 ;;
  *target-lifecycle-state*) echo "$(<"$STATE")" ;;
  *spot/instance-action*) exit 22 ;;
  *127.0.0.1*) exit "$(<"$ANSWERS")" ;;
  *describe-auto-scaling-instances*) echo group-1 ;;
  *set-instance-health*) echo Terminated >"$STATE" ;;
esac
"""
SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
PATIENCE_S = 15
"""How long a machine may take to start, or be silent: minutes in a deployment."""
PROGRAMS = ("aws", "curl", "dnf", "docker", "jq", "modprobe", "sleep", "sysctl", "systemctl")


class Machine:
    """A host that has run its start script."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        for name in PROGRAMS:
            (self._bin / name).write_text(PROGRAM)
            (self._bin / name).chmod(0o700)
        for path in ("etc/systemd/system", "etc/modules-load.d", "etc/sysctl.d", "run", "var/lib"):
            (folder / path).mkdir(parents=True)
        self.is_in("InService")
        self.answers(True)
        # The scripts that it makes name these folders, too.
        script = re.sub(r"(?m)^(START_S|SICK_S)='\d+'$", rf"\1='{PATIENCE_S}'", script)
        self.script = re.sub(r"(?<![\w.$}])/(etc|run|var/lib)/", rf"{folder}/\1/", script)

    def is_in(self, state: str) -> None:
        (self.folder / "state").write_text(f"{state}\n")

    def answers(self, yes: bool) -> None:
        (self.folder / "answers").write_text("0" if yes else "7")

    def runs(self, *command: str) -> list[str]:
        """Run something; returns the programs that it called, with their arguments."""
        calls = self.folder / "calls"
        calls.write_text("")
        done = subprocess.run(
            command,
            env={
                "PATH": f"{self._bin}:{os.environ['PATH']}",
                "CALLS": str(calls),
                "STATE": str(self.folder / "state"),
                "ANSWERS": str(self.folder / "answers"),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return calls.read_text().splitlines()

    def runs_script(self, name: str) -> list[str]:
        return self.runs("bash", str(self.folder / "etc" / "sandfleet" / name))

    def unit(self, name: str) -> str:
        return (self.folder / "etc" / "systemd" / "system" / f"{name}.service").read_text()


@pytest.fixture(scope="module")
def user_data(templates):
    """The text, with a word for each value that CloudFormation fills in."""
    (_, properties), *_ = found(each(templates, "AWS::EC2::LaunchTemplate"))
    parts = properties["LaunchTemplateData"]["UserData"]["Fn::Base64"]["Fn::Join"][1]
    return "".join(part if isinstance(part, str) else word_for(part) for part in parts)


def word_for(value):
    return re.sub(r"\W+", "-", json.dumps(value)).strip("-")[:60]


@pytest.fixture
def machine(tmp_path, user_data):
    machine = Machine(tmp_path, user_data)
    machine.runs("bash", "-c", machine.script)
    return machine


def test_a_crash_in_a_sandbox_starts_nothing_on_the_machine(tmp_path, user_data):
    """Red without the setting: the kernel pipes a core dump, whatever its limit in the sandbox, into a program that is the
    machine's."""
    machine = Machine(tmp_path, user_data)
    calls = machine.runs("bash", "-c", machine.script)
    file = tmp_path / "etc/sysctl.d/90-sandfleet.conf"
    assert file.read_text() == "kernel.core_pattern=core\n"
    assert f"sysctl -q -p {file}" in calls


def starting(calls):
    return [call for call in calls if call.startswith(("systemctl", "aws"))]


def test_it_fits_in_what_aws_takes(user_data):
    """Red when it has more than the 16 KiB of user data: no machine would start. Values are longer than their words here."""
    assert len(user_data.encode()) + 1500 < 16 * 1024


@pytest.mark.parametrize("script", ["secrets.sh", "pull.sh", "machine.sh", "launched.sh", "drain.sh"])
def test_scripts_have_no_fault_that_a_reader_of_scripts_sees(machine, script):
    """Red when a quotation mark is lost on the way through a template."""
    path = machine.folder / "etc" / "sandfleet" / script
    source = path.read_text()
    shell = [] if source.startswith("#!") else ["--shell=bash"]
    done = subprocess.run(
        [SHELLCHECK, "--severity=warning", "--exclude=SC1091", *shell, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_start_script_itself_has_none(tmp_path, user_data):
    path = tmp_path / "user_data.sh"
    path.write_text(user_data)
    done = subprocess.run(
        [SHELLCHECK, "--severity=warning", "--exclude=SC1091", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_sandboxes_outlive_a_restart_of_the_engine(machine):
    """Red when the engine stops them, or systemd stops the daemon with the engine: it would drain and remove them."""
    settings = json.loads((machine.folder / "etc" / "docker" / "daemon.json").read_text())
    assert settings == {"live-restore": True}
    for name in ("sandfleet-host", "sandfleet-executor"):
        assert "Requires=docker" not in machine.unit(name)
        assert "Wants=docker.service" in machine.unit(name)


@pytest.mark.parametrize("name", ["sandfleet-host", "sandfleet-executor"])
def test_images_may_come_slowly_and_logs_not_at_all(machine, name):
    """Red when systemd ends a start at its 90 seconds, to begin it anew, or a log that does not answer stops the process."""
    unit = machine.unit(name)
    assert "TimeoutStartSec=infinity" in unit
    assert "--log-opt mode=non-blocking" in unit


def test_a_daemon_is_reached_at_its_address_and_makes_loop_devices(machine):
    """Red when others must resolve the machine's name, or a device that appears later has no file in the container."""
    unit = machine.unit("sandfleet-host")
    assert "SANDFLEET_HOST_ADDRESS=http://10.0.1.2:8700" in unit
    assert "-v /dev:/dev" in unit
    assert (machine.folder / "etc" / "modules-load.d" / "sandfleet.conf").read_text() == "loop\n"


def test_nothing_is_fetched_from_elsewhere_than_the_images(machine):
    """Red when the base of sandboxes is pulled from a public registry: its limits would keep hosts from starting."""
    unit = machine.unit("sandfleet-host")
    (base,) = re.findall(r"base_image --from (\S+)", unit)
    assert f"ExecStartPre={machine.folder}/etc/sandfleet/pull.sh {base}\n" in unit
    assert base.startswith("111122223333.dkr.ecr.")


def test_a_machine_that_works_is_counted_and_lets_the_deployment_go_on(machine):
    """Red when the group or CloudFormation is not told, or told before."""
    calls = starting(machine.runs_script("launched.sh"))
    assert calls[0] == "systemctl start --no-block sandfleet-host sandfleet-executor"
    (completed,) = [call for call in calls if "complete-lifecycle-action" in call]
    assert "--lifecycle-hook-name launch" in completed
    assert (
        "--auto-scaling-group-name group-1 --instance-id i-1 --lifecycle-action-result CONTINUE" in completed
    )
    (signalled,) = [call for call in calls if "signal-resource" in call]
    assert "--logical-resource-id HostsGroup --unique-id i-1 --status SUCCESS" in signalled


def test_a_machine_that_does_not_work_is_given_up_and_fails_the_deployment(machine):
    """Red when it is counted: a broken image would replace all hosts."""
    machine.answers(False)
    calls = machine.runs_script("launched.sh")
    assert len([c for c in calls if c == "sleep 5"]) == PATIENCE_S / 5
    assert "--lifecycle-action-result ABANDON" in "\n".join(calls)
    assert "--status FAILURE" in "\n".join(calls)


def test_a_machine_for_the_warm_pool_has_its_images_and_takes_no_runs(machine):
    """It is stopped then. Red when an executor claims runs before that, or pulls images only when it is needed."""
    machine.is_in("Warmed:Stopped")
    calls = machine.runs_script("launched.sh")
    assert not [call for call in calls if call.startswith("systemctl")]
    inspected = [call for call in calls if call.startswith("docker image inspect")]
    assert len(inspected) == 3
    assert "--lifecycle-action-result CONTINUE" in "\n".join(calls)
    assert "signal-resource" not in "\n".join(calls)


def test_a_machine_that_is_to_go_drains_its_executor_first(machine):
    """Red when the daemon goes before runs are handed over, or the group waits for its timeout."""
    machine.is_in("Terminated")
    calls = starting(machine.runs_script("drain.sh"))
    assert calls[:2] == ["systemctl stop sandfleet-executor", "systemctl stop sandfleet-host"]
    assert "--lifecycle-hook-name drain" in calls[-1]
    assert "CONTINUE" in calls[-1]


def test_a_machine_that_has_not_worked_for_minutes_has_itself_replaced(machine):
    """AWS only sees that it runs. Red when it stays in the group for ever, or goes at the first silence."""
    machine.answers(False)
    calls = machine.runs_script("drain.sh")
    until = calls[: next(n for n, call in enumerate(calls) if "set-instance-health" in call)]
    assert until.count("sleep 5") == PATIENCE_S / 5
    assert calls[-1].startswith("aws autoscaling complete-lifecycle-action")
