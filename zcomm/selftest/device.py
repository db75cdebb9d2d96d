"""Which device and kernel set to test, and what the report says about the machine."""

import platform

import torch

import zcomm
from zcomm import kernels
from zcomm.conformance import gpu_tools
from zcomm.conformance.contract import Subject
from zcomm.launch.machine import cpu_model
from zcomm.report.usage import UsageError


def chosen(name: str, kernel_set: str | None) -> Subject:
    """Refuses a device or kernel set that is unavailable, with the reason."""
    device = _device(name)
    if device.type == "cuda":
        absent = gpu_tools.absent()
        if absent:
            raise UsageError(f"--device {name}: {absent}")
        device = _numbered(device)
    try:
        name = kernel_set or kernels.forced() or _default(device)
        kernels.select(device, kernel_set)
    except (RuntimeError, ValueError) as error:
        if kernel_set is None:
            raise UsageError(str(error)) from None
        raise UsageError(f"--kernels: {str(error).removeprefix('kernels: ')}") from None
    return Subject(name, device)


def _default(device: torch.device) -> str:
    """Refuses to test the reference on a GPU: says why the other sets are unavailable."""
    name = kernels.default(device.type, device.index or 0)
    if name == "reference":
        raise RuntimeError(f"no kernels: {kernels.absences(device.type, device.index or 0)}")
    return name


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device: expected cpu, cuda or cuda:1, got {name!r}")
    return device


def _numbered(device: torch.device) -> torch.device:
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise UsageError(f"--device: expected a number below {count}, got {device}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def environment(subject: Subject) -> dict[str, str]:
    """What readers of the report need to know."""
    found = {
        "zcomm": zcomm.__version__,
        "torch": f"{torch.__version__}, {gpu_tools.torch_build()}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "processor": f"{cpu_model()}, {torch.get_num_threads()} threads",
        "driver": gpu_tools.driver() or "none",
        "device": f"{subject.device}{_gpu(subject.device)}",
        "kernels": kernels.select(subject.device, subject.kernels).name,
    }
    absent = {name: why for name, why in kernels.available().items() if why}
    return found | {f"{name} unavailable": why for name, why in absent.items()}


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f", {gpu_tools.describe(device.index)}, {gib:.0f} GiB"
