"""`zcomm bench` and `zcomm demo` under torchrun, srun and mpirun: one group, or a sentence."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from zcomm.cli.bench import command as bench
from zcomm.launch import hosts
from zcomm.launch.tasks import LAUNCHERS, Task, task
from zcomm.report.usage import UsageError

COMMAND = [sys.executable, "-P", "-m", "zcomm"]
SMALL = ["bench", "--max-size", "64K", "--rounds", "1", "--codecs", "int8"]
ONE_KIND = ["--collectives", "all_gather", "--json", "rows.json"]
SRUN = {"SLURM_PROCID": "{}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{}"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2"}
MPIEXEC = {"PMI_RANK": "{}", "PMI_SIZE": "2"}
ALL = {"srun": SRUN, "mpirun": MPIRUN, "mpiexec": MPIEXEC}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of a launcher that runs these tests."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def launch(
    folder: Path, arguments: list[str], variables: Mapping[str, str], **env: str
) -> list[tuple[int, str, str]]:
    """Two tasks, as a launcher starts them: the exit code, stdout and stderr of each."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    started = [
        subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=folder,
            env={**env, **{name: value.format(rank) for name, value in variables.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said)]


def test_tasks_that_know_where_to_meet_are_one_group(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    first, second = launch(tmp_path, [*SMALL, *ONE_KIND], MPIRUN, **meeting)
    assert first[0] == second[0] == 0, (first, second)
    assert "all_gather, 2 ranks, lo, gloo" in first[1]
    assert second[1] == ""
    assert json.loads((tmp_path / "rows.json").read_text())["about"]["ranks"] == 2


def test_tasks_that_do_not_say_it_once_and_measure_nothing(tmp_path: Path) -> None:
    first, second = launch(tmp_path, SMALL, SRUN)
    assert first[:2] == (2, "")
    assert first[2] == (
        "zcomm bench: expected MASTER_ADDR and MASTER_PORT, where the 2 tasks of srun meet, got no "
        "MASTER_ADDR and no MASTER_PORT; HOST is where rank 0 runs: "
        "MASTER_ADDR=HOST MASTER_PORT=29500 srun …\n"
    )
    assert second == (2, "", "")


def test_the_demo_runs_once(tmp_path: Path) -> None:
    first, second = launch(tmp_path, ["demo", "--steps", "1"], MPIRUN)
    assert first[:2] == (2, "")
    assert "got 2 tasks under mpirun: zcomm demo starts its own ranks" in first[2]
    assert second == (2, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_meet_the_others_says_so(tmp_path: Path) -> None:
    first, second = launch(tmp_path, SMALL, MPIRUN, MASTER_ADDR="127.0.0.1", MASTER_PORT="no port")
    for rank, (code, out, err) in enumerate((first, second)):
        assert (code, out) == (2, "")
        assert err.startswith(f"zcomm bench: rank {rank}: expected 2 ranks to meet at 127.0.0.1:no")


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(1))


@pytest.mark.parametrize("launcher", ALL)
def test_every_launchers_variables_are_known(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, ALL[launcher])
    remedies = {names.launcher: names.remedy for names in LAUNCHERS}
    assert task() == Task(launcher, 1, 2, 2, remedies[launcher])


def test_mpirun_inside_a_slurm_job_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**SRUN, **MPIRUN, "SLURM_NTASKS": "64"})
    found = task()
    assert found is not None
    assert (found.launcher, found.world_size) == ("mpirun", 2)


def test_slurm_says_how_many_tasks_a_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"SLURM_NTASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_ID": "0"}
    set_all(monkeypatch, {**SRUN, **more, "SLURM_JOB_ID": "7"})
    found = task()
    assert found is not None
    assert found.here == 4


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # in sbatch's script
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},  # in a shell of salloc
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # srun --pty
    ],
    ids=str,
)
def test_a_shell_in_a_slurm_job_is_no_task(
    variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, variables)
    assert task() is None


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "expected RANK in the environment as a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "expected RANK below WORLD_SIZE, 2, got 2"),
    ],
    ids=str,
)
def test_variables_that_make_no_sense(
    variables: Mapping[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(UsageError, match=says):
        task()


def help_command(host: str) -> list[str]:
    """torchrun's command as `zcomm bench --help` shows it, for a small tensor."""
    found = re.search(r"^    torchrun (.*?[^\\])$", bench.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert found
    words = found[1].replace("\\\n", " ").replace("HOST", host).replace("64M", "64K").split()
    return [sys.executable, "-P", "-m", "torch.distributed.run", *words, *SMALL[3:], *ONE_KIND]


def test_the_command_for_two_hosts_works_on_two_hosts(tmp_path: Path) -> None:
    """Each host is a network namespace, named after its address: their names do not resolve."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    try:
        with hosts.network(2, "1gbit") as prefixes:
            started = [
                subprocess.Popen(
                    [*prefix, *named, f"198.18.0.{host}", *help_command("198.18.0.1")],
                    cwd=tmp_path,
                    env={**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for host, prefix in enumerate(prefixes, 1)
            ]
            try:
                said = [process.communicate(timeout=100) for process in started]
            finally:
                for process in started:
                    process.kill()
    except hosts.NoHosts as error:
        pytest.skip(str(error))
    assert [process.returncode for process in started] == [0, 0], said
    assert sum("all_gather, 2 ranks, eth0" in out for out, _ in said) == 1
