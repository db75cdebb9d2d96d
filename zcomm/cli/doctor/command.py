"""Checks this machine and tries zcomm on it.

Ends with "ready" and exit code 0, or with what to fix and exit code 1.
Takes a few seconds: one check trains a small model on two ranks.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from zcomm import kernels, torch_private
from zcomm.cli.doctor import self_test
from zcomm.conformance import gpu_tools
from zcomm.kernels import KERNELS_VARIABLE
from zcomm.kernels.cpu import ISA_VARIABLE
from zcomm.launch import interfaces
from zcomm.launch.machine import cpu_model
from zcomm.report.finding import NOTE, OK, PROBLEM, Finding, guarded, say, show, show_remedies
from zcomm.torch_private.probe import NEWEST, OLDEST

HELP = "check that zcomm works on this machine; if not, say what to fix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run(args: argparse.Namespace) -> int:
    found: dict[str, Finding] = {}
    for name, check in CHECKS.items():
        found[name] = guarded(check)
        if not args.json:
            say(show(name, found[name]))
    remedies = [f.remedy for f in found.values() if f.state == PROBLEM]
    say(_json(found, remedies) if args.json else _verdict(remedies))
    return 1 if remedies else 0


def _verdict(remedies: list[str]) -> str:
    if not remedies:
        return "\nready"
    return "\n".join(["\nnot ready. What to fix:", *show_remedies(remedies)])


def _json(found: dict[str, Finding], remedies: list[str]) -> str:
    checks = {name: {"remedy": f.remedy, **f.values()} for name, f in found.items()}
    return json.dumps({"ready": not remedies, "what_to_do": remedies, "checks": checks}, indent=1)


def check_installation() -> Finding:
    details = {
        "zcomm": zcomm.__version__,
        "folder": str(Path(zcomm.__file__).parent),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
    }
    text = "{zcomm}, Python {python}, {system}, {libc}".format(**details)
    return Finding(OK, [text, f"in {details['folder']}"], details=details)


def check_torch() -> Finding:
    version = str(torch.__version__)
    threads = torch.get_num_threads()
    details = {"version": version, "threads": threads}
    text = f"{version}, {threads} thread{'' if threads == 1 else 's'}"
    if _numbers(version) < _numbers(OLDEST):
        remedy = f"Install a newer torch: pip install 'torch>={OLDEST}'."
        return Finding(PROBLEM, [f"{text}; expected {OLDEST} or later"], remedy, details)
    return Finding(OK, [text], details=details)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def check_private() -> Finding:
    """Whether this torch has the private names that zcomm uses. Without FSDP's, DDP still works."""
    lost = torch_private.missing()
    if not lost:
        return Finding(OK, ["all private names of torch that zcomm uses are there"])
    lines = list(lost.values())
    if lost.keys() == {"fsdp"}:
        return Finding(NOTE, [*lines, "everything but zcomm.fsdp works"], details=dict(lost))
    remedy = f"Install a torch that zcomm is tested with: {OLDEST} to {NEWEST}."
    return Finding(PROBLEM, lines, remedy, dict(lost))


def check_backends() -> Finding:
    there = {name: dist.is_backend_available(name) for name in ("gloo", "nccl", "mpi", "ucc")}
    here, absent = ([name for name in there if there[name] is is_here] for is_here in (True, False))
    line = f"this torch has {', '.join(here) or 'none'}; it lacks {', '.join(absent) or 'none'}"
    if not there["gloo"]:
        remedy = "Install a torch with gloo, which carries zcomm's bytes. PyPI's builds have it."
        return Finding(PROBLEM, [line], remedy, dict(there))
    routes = "CPU tensors go over gloo, or through memory on one host; GPU tensors over nccl"
    return Finding(OK, [line, routes], "", dict(there))


def check_processor() -> Finding:
    """The instruction set of the kernels that a call without `kernels=` uses on CPU tensors.

    Ignores a GPU kernel set in ZCOMM_KERNELS.
    """
    details: dict[str, Any] = {"model": cpu_model(), "cores": os.cpu_count(), "in_use": None}
    variables = {name: os.environ.get(name) for name in (KERNELS_VARIABLE, ISA_VARIABLE)}
    if variables[KERNELS_VARIABLE] in kernels.ON_GPUS:
        del variables[KERNELS_VARIABLE]
    forced = [f"{name}={value}" for name, value in variables.items() if value]
    details["forced_by"] = forced
    lines = [f"{details['model']}, {details['cores']} cores"]
    try:
        in_use = kernels.select(torch.device("cpu"), variables.get(KERNELS_VARIABLE) or "cpu").name
    except (RuntimeError, ValueError) as error:
        remedy = f"Unset {' and '.join(forced)}." if forced else _REINSTALL
        return Finding(PROBLEM, [*lines, str(error)], remedy, details)
    details["in_use"] = in_use
    isa = in_use.removeprefix("cpu:") if in_use.startswith("cpu:") else "none (plain torch)"
    why = f", set by {' and '.join(forced)}" if forced else ", the fastest here"
    lines.append(f"instruction set in use: {isa}{why}")
    return Finding(NOTE if forced else OK, lines, details=details)


def check_kernels() -> Finding:
    sets = zcomm.available_kernels()
    lines = [
        f"{name:<12}{'unavailable: ' + why if why else 'available'}" for name, why in sets.items()
    ]
    chosen = {kind: kernels.default(kind) for kind in ("cpu", "cuda")}
    lines.append(f"default for CPU tensors: {chosen['cpu']}; for CUDA tensors: {chosen['cuda']}")
    if torch.xpu.is_available():
        chosen["xpu"] = kernels.default("xpu")
        lines[-1] += f"; for Intel GPUs: {chosen['xpu']}"
    details = {"absent": {name: why for name, why in sets.items() if why}, "chosen": chosen}
    if sets["cpu:scalar"]:  # every processor has this one
        return Finding(PROBLEM, lines, _REINSTALL, details)
    name = kernels.forced()
    if name is None:
        return Finding(OK, lines, details=details)
    forced = f"{KERNELS_VARIABLE}={name}"
    if name in sets and not sets[name]:
        devices = ("any device",) if name == "reference" else kernels.ON_GPUS.get(name, ("cpu",))
        lines.append(f"but {forced} forces {name}, for tensors on {' or '.join(devices)}")
        return Finding(NOTE, lines, details=details)
    wrong = f"{name}, which is unavailable" if name in sets else "no set"
    lines.append(f"but {forced} names {wrong}")
    remedy = f"Unset {forced}: it makes calls without kernels= fail."
    return Finding(PROBLEM, lines, remedy, details)


_REINSTALL = (
    "Reinstall zcomm for this Python: pip install --force-reinstall --no-deps zcomm; or, from "
    "source with a C++17 compiler: pip install ."
)

CHECKS: dict[str, Callable[[], Finding]] = {
    "zcomm": check_installation,
    "torch": check_torch,
    "internals": check_private,
    "backends": check_backends,
    "processor": check_processor,
    "kernels": check_kernels,
    "cuda": gpu_tools.check,
    "network": interfaces.check,
    "vectors": self_test.check_vectors,
    "two ranks": self_test.check_ranks,
    "shared memory": self_test.check_shared_memory,
}
