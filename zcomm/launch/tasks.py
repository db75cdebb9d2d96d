"""Whether a launcher started this process as one of several: torchrun, mpirun, mpiexec or srun."""

import os
import re
from typing import NamedTuple

from zcomm.report.usage import UsageError

TORCHRUN = "torchrun"
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")


class Variables(NamedTuple):
    """Where a launcher says which process this is, of how many; and how to hand on variables."""

    launcher: str
    rank: str
    world_size: str
    here: tuple[str, ...]  # how many are on this host
    remedy: str


# In this order: torchrun and mpirun may themselves run under srun.
LAUNCHERS = (
    Variables(
        TORCHRUN,
        "RANK",
        "WORLD_SIZE",
        ("LOCAL_WORLD_SIZE",),
        "export MASTER_ADDR=HOST MASTER_PORT=29500 on every host",
    ),
    Variables(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …",
    ),
    Variables(
        "mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALNRANKS",),
        "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 …",
    ),
    Variables(
        "srun",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "MASTER_ADDR=HOST MASTER_PORT=29500 srun …",
    ),
)


class Task(NamedTuple):
    """This process, as one of those that a launcher started."""

    launcher: str
    rank: int
    world_size: int
    here: int  # on this host, at most
    remedy: str


def task() -> Task | None:
    """None if this process was started alone. Slurm and MPI may also start a single one."""
    for names in LAUNCHERS:
        if names.rank not in os.environ or names.world_size not in os.environ:
            continue
        if names.launcher == "srun" and _in_batch_script():
            continue
        rank, world_size = _number(names.rank), _number(names.world_size)
        if rank >= world_size:
            raise UsageError(
                f"expected {names.rank} below {names.world_size}, {world_size}, got {rank}; unset "
                "both to start ranks on this machine"
            )
        if world_size > 1 or names.launcher == TORCHRUN:
            here = _most_on_a_host(names.here, world_size)
            return Task(names.launcher, rank, world_size, here, names.remedy)
    return None


def leads() -> bool:
    """Whether this process speaks for all that a launcher started."""
    try:
        one = task()
    except UsageError:
        return True
    return one is None or one.rank == 0


def expect_alone(command: str) -> None:
    """Refuses a command that starts its own ranks, once for all tasks of a launcher."""
    one = task()
    if one is not None:
        raise UsageError(
            f"expected to be started once, got {one.world_size} tasks under {one.launcher}: "
            f"{command} starts its own ranks; run it without {one.launcher}"
        )


def expect_meeting_point(one: Task) -> None:
    """Refuses tasks that were not told where to meet: each would measure alone."""
    missing = [name for name in MEETING_POINT if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"expected MASTER_ADDR and MASTER_PORT, where the {one.world_size} tasks of "
            f"{one.launcher} meet, got no {' and no '.join(missing)}; HOST is where rank 0 runs: "
            f"{one.remedy}"
        )


def _in_batch_script() -> bool:
    """sbatch's script looks like task 0, but only srun starts tasks, in a step of the job."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ


def _number(name: str) -> int:
    text = os.environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"expected {name} in the environment as a number, got {text!r}; unset it")
    return int(text)


def _most_on_a_host(names: tuple[str, ...], world_size: int) -> int:
    """As Slurm writes it: 2(x3),1 means 2 on each of three hosts and 1 on the last."""
    text = next((os.environ[name] for name in names if name in os.environ), "")
    counts = [int(n) for n in re.findall(r"([0-9]{1,9})(?:\(x[0-9]+\))?", text)]
    return max(counts, default=world_size) or world_size
