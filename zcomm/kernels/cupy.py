"""The cupy kernel set: the CUDA kernels, compiled on first use for the device at hand.

It serves machines with an NVIDIA GPU but no matching `zcomm._cuda`. Sources, plans, launch order
and arguments are those of the cuda set. CuPy provides NVRTC, which compiles the kernels, and the
driver loads them. A kernel file is compiled when a layout first needs it, then cached on disk.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from zcomm.kernels import cuda_driver, nvrtc
from zcomm.kernels.cuda import CudaKernels, for_rocm, without_cuda
from zcomm.kernels.nvrtc import Unit

# Returns a unit's machine code or PTX for a device.
Images = Callable[[Unit, torch.device], bytes]


class CupyKernels(CudaKernels):
    """Kernels that a driver loads. On an emulator, both the images and the driver differ."""

    def __init__(
        self,
        name: str = "cupy",
        driver: cuda_driver.Driver | None = None,
        images: Images | None = None,
    ) -> None:
        from zcomm import _core

        super().__init__(_core, name)
        self._driver = driver or cuda_driver.Driver()
        self._images = images or self._image
        self._driver.start()
        self._launchers: dict[int, Any] = {}
        self._loading = threading.Lock()

    def launcher(self, plan: Any, device: torch.device) -> Any:
        """A launcher with all kernels that the plan may launch."""
        ordinal = device.index or 0
        with self._loading:
            if ordinal not in self._launchers:
                self._launchers[ordinal] = self._driver.launcher(ordinal)
            found = self._launchers[ordinal]
            for kernel in plan.kernels():
                if not found.has(kernel):
                    _, file, rows = self._module.KERNELS[kernel]
                    self._load(found, Unit(file, rows), device)
        return found

    def _image(self, unit: Unit, device: torch.device) -> bytes:
        return nvrtc.image(unit, nvrtc.target_for(self._driver.capability(device.index or 0)))

    def _load(self, launcher: Any, unit: Unit, device: torch.device) -> None:
        symbols = {
            symbol: kernel
            for kernel, (symbol, file, rows) in enumerate(self._module.KERNELS)
            if unit == (file, rows)
        }
        functions = self._driver.load(self._images(unit, device), [*symbols], device.index or 0)
        for kernel, function in zip(symbols.values(), functions):
            launcher.set_function(kernel, function)


def missing(ordinal: int = 0) -> str:
    """Why a device cannot run the kernels; "" if it can. Quick checks come first."""
    reason = for_rocm() or nvrtc.missing() or cuda_driver.missing(0) or nvrtc.missing_library()
    reason = reason or cuda_driver.missing(nvrtc.version()[0])
    return reason or _no_target(ordinal) or without_cuda()


def _no_target(ordinal: int) -> str:
    try:
        nvrtc.target_for(cuda_driver.Driver().capability(ordinal))
    except RuntimeError as error:  # an old GPU, or none with this number
        return str(error)
    return ""
