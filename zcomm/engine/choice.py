"""Which engine a device has."""

from __future__ import annotations

from typing import Any

import torch

from zcomm import kernels as kernel_sets
from zcomm.engine.cpu import Engine
from zcomm.engine.device import DeviceEngine
from zcomm.engine.job_thread import JobThread
from zcomm.engine.streams import Streams
from zcomm.sharding.hosts import Hosts
from zcomm.transport.channels import Transport


def make_engine(
    group: Any,
    name: str,
    timeout_s: float,
    streams: Streams | None,
    threads: int | None = None,
    hosts: Hosts | None = None,
) -> JobThread:
    """An engine over the ranks of a group, all of which make one; without streams, on the CPU."""
    # Absent or unknown ones are an error of this call, not of a backward that others wait for.
    kernel_sets.select(streams.device if streams else torch.device("cpu"))
    if streams is None:
        return Engine(Transport(group, name, timeout_s, hosts=hosts), threads)
    transport = Transport(group, name, timeout_s, streams.device, in_order=True, hosts=hosts)
    return DeviceEngine(transport, streams, threads)
