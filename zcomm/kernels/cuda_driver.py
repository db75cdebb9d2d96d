"""The part of CUDA's driver API that loads kernels compiled at run time.

The library comes with the GPU driver, not with torch or CUDA. `zcomm._core` does the launches: it
gets the addresses of the driver's functions, so a launch runs no Python.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class DriverError(RuntimeError):
    """The driver refused a call."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """Raises OSError if the library is not found. Call `start` before any device call."""

    def __init__(self, library: str | None = None) -> None:
        self._library = ctypes.CDLL(library or LIBRARY)
        self._contexts: dict[int, int] = {}

    def start(self) -> None:
        self._call("cuInit", 0)

    def version(self) -> int:
        """The newest CUDA version it supports: 13000 for 13.0."""
        return self._number("cuDriverGetVersion").value

    def device_count(self) -> int:
        return self._number("cuDeviceGetCount").value

    def capability(self, ordinal: int) -> tuple[int, int]:
        """A device's compute capability."""
        device = self._number("cuDeviceGet", ordinal)
        major = self._number("cuDeviceGetAttribute", _MAJOR, device)
        return major.value, self._number("cuDeviceGetAttribute", _MINOR, device).value

    def load(self, image: bytes, symbols: Sequence[str], ordinal: int) -> list[int]:
        """Loads machine code or PTX on a device; returns the kernels with these names."""
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(self.context(ordinal)))
        try:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
            return [self._function(module, symbol) for symbol in symbols]
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _function(self, module: ctypes.c_void_p, symbol: str) -> int:
        function = ctypes.c_void_p()
        name = ctypes.c_char_p(symbol.encode())
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name)
        return int(function.value or 0)

    def context(self, ordinal: int) -> int:
        """The context that torch and CuPy share on a device."""
        if ordinal not in self._contexts:
            device, context = self._number("cuDeviceGet", ordinal), ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[ordinal] = int(context.value or 0)
        return self._contexts[ordinal]

    def launcher(self, ordinal: int) -> Any:
        """A launcher for a device, with no kernels yet."""
        from zcomm import _core

        return _core.Driver(
            self._address("cuLaunchKernel"),
            self._address("cuGetErrorName"),
            self._address("cuCtxSetCurrent"),
            self.context(ordinal),
        )

    def _address(self, name: str) -> int:
        return int(ctypes.cast(self._library[name], ctypes.c_void_p).value or 0)

    def _number(self, name: str, *arguments: Any) -> ctypes.c_int:
        """The integer that a call writes through its first argument."""
        found = ctypes.c_int()
        self._call(name, ctypes.byref(found), *arguments)
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        error = self._library[name](*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library["cuGetErrorName"](error, ctypes.byref(text))
            known = text.value.decode() if text.value else f"error {error}"
            raise DriverError(f"{name}: expected success, got {known}", error)


def missing(least_version: int) -> str:
    """Why no kernel can run; "" if some can. `least_version` is a CUDA major version."""
    try:
        driver = Driver()
        driver.start()
        count = driver.device_count()
    except OSError:
        return "no CUDA driver"
    except DriverError as error:
        return "no CUDA device" if error.code == _NO_DEVICE else str(error)
    if count == 0:
        return "no CUDA device"
    if driver.version() // 1000 < least_version:
        return f"the CUDA driver is older than CUDA {least_version}; update it"
    return ""
