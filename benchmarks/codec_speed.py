"""How fast the codecs are, compared with memcpy and with what users have today.

    roofline = (bytes the primitive must read and write / memcpy's bytes per second) / time

Memcpy's bytes include both reads and writes. Each task is timed right after a memcpy, and a codec's
tasks take turns, so all of them run under the same conditions. A ratio is the median over rounds.
Tasks use one thread and the fastest instruction set unless the row says otherwise.

Usage: python benchmarks/codec_speed.py [--numel N] [--rounds R] [--only REGEX] [--json F] [--check]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import measuring
import zcomm
from zcomm.cli.bench.collective_rows import median_ratio
from zcomm.codecs import SPECS
from zcomm.launch import machine

# The floors that --check enforces: a regular expression for the whole row name, and a minimum.
BARS = (
    (r"(int8|int4|sign) encode\+residual", 0.75),
    (r"lm4 encode\+residual", 0.45),
    (r"(lm3|lm2) encode\+residual", 0.40),
    (r"(int8|int4) decode_sum", 0.60),
    (r"lm4 decode_sum", 0.50),
    (r"topk:0.01 encode\+residual / torch.topk", 12.0),
    (r"int8 encode\+residual / plain torch", 10.0),
    (r"int8 encode\+residual / bitsandbytes", 8.0),
    (r"(int8|int4|sign) encode\+residual, avx2", 0.55),
    (r"lm. encode\+residual, avx2", 0.25),
    (r".* encode\+residual, bf16 gradient / fp32", 1.0),
    (r".*, 2 threads", 0.8),
)
WIRES = 4
BLOCK = 128
REFERENCE_PART = 16
ROOFLINE, FASTER, GAIN = "of roofline", "times as fast", "of memcpy's gain"
# For each task, the seconds of (the memcpy before it, the task) in each round.
Times = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Task:
    """Something to time; `nbytes` is what it must read and write.

    A task that runs on 1/part of the elements counts `part` times its time.
    """

    run: Callable[[], object]
    nbytes: int = 0
    threads: int = 1
    part: int = 1


@dataclass(frozen=True)
class Row:
    """One line of the table: a task by itself (roofline), or against the fastest of its rivals."""

    name: str
    unit: str
    task: str
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    name: str
    unit: str
    value: float | None
    ms: float | None
    bar: float | None
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.value is not None and self.bar is not None and self.value < self.bar


class Memcpy:
    """The yardstick: memmove of n fp32 values, by one thread or two (ctypes releases the GIL)."""

    def __init__(self, n: int) -> None:
        self.src, self.dst = torch.ones(n), torch.zeros(n)
        self.nbytes = 4 * n
        self.pool = ThreadPoolExecutor(2)

    def copy(self, offset: int, nbytes: int) -> None:
        ctypes.memmove(self.dst.data_ptr() + offset, self.src.data_ptr() + offset, nbytes)

    def one(self) -> None:
        self.copy(0, self.nbytes)

    def two(self) -> None:
        half = self.nbytes // 2
        list(self.pool.map(self.copy, (0, half), (half, self.nbytes - half)))


def seconds(run: Callable[[], object], threads: int) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def plain_torch_int8(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """int8 blocks with error feedback, written the obvious way in eager torch."""
    v = (x + residual).view(-1, BLOCK)
    scale = (v.abs().amax(1, keepdim=True) / 127).clamp_(min=1e-30)
    codes = (v / scale).round_().clamp_(-127, 127).to(torch.int8)
    torch.sub(v, codes * scale, out=residual.view(-1, BLOCK))
    return codes, scale


def codec_tasks(name: str, x: Tensor, residual: Tensor, out: Tensor) -> dict[str, Task]:
    """The primitives of one codec.

    The wires are four buffers: a single buffer read four times would stay in the cache.
    """
    c, n = zcomm.codec(name), x.numel()
    wires = [c.encode(x) for _ in range(WIRES)]
    nbytes, x16 = wires[0].numel(), x.bfloat16()
    # The reference makes large temporaries. Running it on a part favors it (the cache).
    x_part, residual_part = x[: n // REFERENCE_PART], residual[: n // REFERENCE_PART]

    def fed(kernels: str | None, threads: int = 1) -> Task:
        run = partial(c.encode, x, residual, out=wires[0], kernels=kernels)
        return Task(run, 12 * n + nbytes, threads)

    def summed(kernels: str | None, threads: int = 1) -> Task:
        run = partial(c.decode_sum, wires, n, out=out, kernels=kernels)
        return Task(run, WIRES * nbytes + 4 * n, threads)

    bf16 = partial(c.encode, x16, residual, out=wires[0])
    reference = partial(c.encode, x_part, residual_part, kernels="reference")
    return {
        "encode+residual": fed(None),
        "encode": Task(partial(c.encode, x, out=wires[0]), 4 * n + nbytes),
        "decode": Task(partial(c.decode, wires[0], n, out=out), nbytes + 4 * n),
        "decode_sum": summed(None),
        "encode+residual, avx2": fed("cpu:avx2"),
        "decode_sum, avx2": summed("cpu:avx2"),
        "encode+residual, bf16 gradient": Task(bf16, 10 * n + nbytes),
        "encode+residual, 2 threads": fed(None, threads=2),
        "decode_sum, 2 threads": summed(None, threads=2),
        "encode+residual, reference": Task(reference, part=REFERENCE_PART),
    }


def rival_tasks(name: str, x: Tensor, residual: Tensor) -> dict[str, Task]:
    """What users have today."""
    if name.startswith("topk"):
        k = round(float(name.split(":")[1]) * x.numel())
        return {"torch.topk": Task(lambda: torch.topk(x.abs(), k))}
    if name != "int8":
        return {}
    tasks = {"plain torch": Task(partial(plain_torch_int8, x, residual))}
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes.functional import quantize_blockwise

        tasks["bitsandbytes"] = Task(partial(quantize_blockwise, x))
    return tasks


def codec_rows(name: str) -> Iterator[Row]:
    fed, bf16 = "encode+residual", "encode+residual, bf16 gradient"
    for task in (fed, "encode", "decode", "decode_sum", f"{fed}, avx2", "decode_sum, avx2"):
        yield Row(f"{name} {task}", ROOFLINE, task)
    yield Row(f"{name} {bf16} / fp32", FASTER, bf16, (fed,))
    for task in (fed, "decode_sum"):
        yield Row(f"{name} {task}, 2 threads", GAIN, f"{task}, 2 threads", (task,))
    if name.startswith("topk"):
        yield Row(f"{name} {fed} / torch.topk", FASTER, fed, ("torch.topk",))
    if name == "int8":
        rivals = ("plain torch", f"{fed}, reference")
        yield Row(f"{name} {fed} / plain torch", FASTER, fed, rivals)
        yield Row(f"{name} {fed} / bitsandbytes", FASTER, fed, ("bitsandbytes",))


def measure(tasks: dict[str, Task], memcpy: Memcpy, rounds: int) -> Times:
    """A first round warms up and is not counted."""
    times: Times = {name: [] for name in tasks}
    for _ in range(rounds + 1):
        for name, task in tasks.items():
            before = seconds(memcpy.one, threads=1)
            times[name].append((before, task.part * seconds(task.run, task.threads)))
    return {name: pairs[1:] for name, pairs in times.items()}


def result(row: Row, tasks: dict[str, Task], times: Times, n: int) -> Result:
    bar = next((least for rows, least in BARS if re.fullmatch(rows, row.name)), None)
    absent = [name for name in (row.task, *row.against) if name not in tasks]
    if absent:
        note = "not installed" if absent[0] == "bitsandbytes" else "not on this CPU"
        return Result(row.name, row.unit, None, None, bar, note)
    memcpy, own = ([pair[i] for pair in times[row.task]] for i in (0, 1))
    if row.unit == ROOFLINE:
        value = tasks[row.task].nbytes / (8 * n) * median_ratio(memcpy, own)
    else:
        others = [[pair[1] for pair in times[name]] for name in row.against]
        value = median_ratio([min(round_) for round_ in zip(*others)], own)
    if row.unit == GAIN:
        value /= median_ratio(*([pair[i] for pair in times["memcpy, 2 threads"]] for i in (0, 1)))
    return Result(row.name, row.unit, value, 1e3 * statistics.median(own), bar)


def run_codec(name: str, rows: list[Row], memcpy: Memcpy, n: int, rounds: int) -> list[Result]:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros(n)
    tasks = codec_tasks(name, x, residual, torch.empty(n)) | rival_tasks(name, x, residual)
    tasks["memcpy, 2 threads"] = Task(memcpy.two, threads=2)
    if "avx2" not in machine.cpu_isas():
        tasks = {key: task for key, task in tasks.items() if "avx2" not in key}
    needed = {key for row in rows for key in (row.task, *row.against)}
    needed |= {"memcpy, 2 threads"} if any(row.unit == GAIN for row in rows) else set()
    times = measure({key: task for key, task in tasks.items() if key in needed}, memcpy, rounds)
    return [result(row, tasks, times, n) for row in rows]


def print_result(r: Result) -> None:
    if r.value is None:
        print(f"{r.name:48} {'–':>8} {'–':>7} {r.note}", flush=True)
        return
    bar = "" if r.bar is None else f"  bar {r.bar:g}{'  MISSED' if r.missed else ''}"
    print(f"{r.name:48} {r.ms:8.1f} {r.value:7.2f} {r.unit}{bar}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Speed of the codecs, as ratios measured in one run."
    )
    parser.add_argument(
        "--numel", type=int, default=64 << 20, help="elements, a multiple of 128 (default 64M)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds whose median counts")
    parser.add_argument(
        "--only", default="", help="only the rows in which this regular expression is found"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    args = parser.parse_args()
    if args.numel <= 0 or args.numel % BLOCK:
        parser.error(f"--numel: expected a positive multiple of {BLOCK}, got {args.numel}")

    about = measuring.about(numel=args.numel, rounds=args.rounds)
    print(" · ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'':48} {'ms':>8} {'ratio':>7}")
    memcpy = Memcpy(args.numel)
    results: list[Result] = []
    for name in SPECS:
        rows = [row for row in codec_rows(name) if re.search(args.only, row.name)]
        for r in run_codec(name, rows, memcpy, args.numel, args.rounds) if rows else []:
            print_result(r)
            results.append(r)
    if not results:
        parser.error(f"--only: expected a part of a row's name, got {args.only!r}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps(about | {"rows": [asdict(r) for r in results]}, indent=2) + "\n"
        )
    missed = [r for r in results if r.missed]
    for r in missed:
        print(f"missed: {r.name}: {r.value:.2f} {r.unit}, bar {r.bar:g}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
