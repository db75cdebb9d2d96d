"""`zcomm plan --measure`: what codec="auto" would choose here, without training."""

import math
from collections.abc import Sequence

import torch

from zcomm.engine.engine import make_engine
from zcomm.engine.tuning.choice import Choice, Gradients, decide
from zcomm.engine.tuning.cost import BUCKET_NBYTES
from zcomm.engine.tuning.measure import Ranks
from zcomm.launch import launchers
from zcomm.launch.launchers import Launcher
from zcomm.launch.tasks import task
from zcomm.report.table import whole
from zcomm.report.usage import UsageError
from zcomm.sharding.settings import Settings
from zcomm.transport.channels import group_timeout_s
from zcomm.transport.handshake import Caller, meet

HEADINGS = ("codec", "communication", "step", "")


def run(numel: int, world_size: int | None, hosts: int | None, rate: str) -> int:
    """Under a launcher, on its ranks; else on ranks of this machine, with hosts emulated."""
    one = task()
    if one is not None:
        with launchers.joined(one, "gloo") as launcher:
            return show(launcher, numel)
    if world_size is None or world_size < 2:
        raise UsageError(
            "--measure: expected --world of at least 2, or a launcher such as torchrun"
        )
    hosts = hosts or 1
    if world_size % hosts:
        raise UsageError(f"expected --world as a multiple of --hosts, got {world_size} and {hosts}")
    link = rate if hosts > 1 else None
    with launchers.local(world_size, hosts > 1, link, world_size // hosts) as launcher:
        return show(launcher, numel)


def show(launcher: Launcher, numel: int) -> int:
    choice = Choice.loads(launcher.run(measured, numel)[0])
    if launcher.leads:
        print(choice)
        if choice.options:
            print(whole(HEADINGS, choice.table()))
            print(f"measured in {choice.measured_s:.1f} s on {launcher.ranks} ranks")
    return 0


def measured(rank: int, world_size: int, numel: int) -> str:
    """Runs on every rank: the choice for a model of so many fp32 parameters, as JSON."""
    device = torch.device("cpu")
    caller = Caller("zcomm plan --measure", None, group_timeout_s(None))
    met = meet({"parameters": str(numel)}, None, caller, rank, device)
    engine = make_engine(caller, met.name, None, hosts=met.grouped)
    two_hops = Settings().two_hops(met.grouped)
    ranks = Ranks(rank, met.hosts, met.grouped)
    sent = Gradients("all_reduce", buckets_of(numel))
    choice, _ = decide(engine, ranks, [caller], None, two_hops, device, sent)
    engine.stop()
    return choice.dumps()


def buckets_of(numel: int) -> Sequence[int]:
    """DDP's buckets of its default size."""
    count = max(math.ceil(4 * numel / BUCKET_NBYTES), 1)
    return [math.ceil(numel / count)] * count
