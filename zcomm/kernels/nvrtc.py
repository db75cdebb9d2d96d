"""Compiles the CUDA kernels at run time with NVRTC, through CuPy's bindings.

The wheel includes the sources that `zcomm._cuda` is built from. A unit is what one compilation
takes: a kernel file and, for codecs with blocks, a number of rows per block.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from zcomm.kernels.image_cache import cached

SOURCES = Path(__file__).parent / "csrc"
# nvcc options that NVRTC implies (-O3) or receives in another way.
_NVCC_ONLY = ("-O3", "-Icsrc")
_INSTALL = (
    "pip install 'zcomm[cupy]', or where torch is for CUDA 12: pip install cupy-cuda12x "
    "nvidia-cuda-nvrtc-cu12"
)


class Unit(NamedTuple):
    file: str
    rows: int  # 0 for a file without blocks


def image(unit: Unit, target: str) -> bytes:
    """A unit compiled for a target, from the cache if possible."""
    name = f"{unit.file}_{unit.rows}_{target}_{_key(unit, target)}.image"
    return cached(name, lambda: compiled(unit, target))


def target_for(capability: tuple[int, int], supported: Sequence[int] = ()) -> str:
    """Machine code for the device's major version; PTX if the device is newer than NVRTC."""
    supported = supported or _binding().getSupportedArchs()
    major, arch = capability[0], 10 * capability[0] + capability[1]
    same = [known for known in supported if known // 10 == major and known <= arch]
    if same:
        return f"sm_{max(same)}"
    older = [known for known in supported if known < arch]
    if not older:
        least = min(supported)
        raise RuntimeError(
            f"NVRTC {'.'.join(map(str, version()))} compiles for GPUs of compute capability "
            f"{least // 10}.{least % 10} or later, and this one has {major}.{capability[1]}; use "
            "an older cupy and NVRTC, or kernels='triton' or 'reference'"
        )
    return f"compute_{max(older)}"


def compiled(unit: Unit, target: str) -> bytes:
    """A unit compiled for a target such as sm_90 (machine code) or compute_90 (PTX)."""
    nvrtc, headers = _binding(), _headers()
    source = (SOURCES / "cuda" / f"{unit.file}.cu").read_text()
    program = nvrtc.createProgram(
        source, f"{unit.file}.cu", tuple(headers.values()), tuple(headers)
    )
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={target}", *_options(unit)))
        made = nvrtc.getCUBIN(program) if target.startswith("sm_") else nvrtc.getPTX(program)
        return bytes(made)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(
            f"kernels cupy: expected NVRTC to compile {unit.file}.cu for {target}, got {error}\n"
            f"{nvrtc.getProgramLog(program)}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)


def version() -> tuple[int, int]:
    """NVRTC's version, which is CUDA's."""
    major, minor = _binding().getVersion()
    return major, minor


def missing() -> str:
    """Why nothing can be compiled, without looking for NVRTC; "" if it might work."""
    if importlib.util.find_spec("cupy_backends") is None:
        return f"CuPy is not installed; {_INSTALL}"
    if not (SOURCES / "cuda").is_dir():
        return f"the kernels' sources are not in {SOURCES.parent}; install zcomm as a wheel"
    return ""


@lru_cache(maxsize=1)
def missing_library() -> str:
    """Why NVRTC cannot be used; "" if it can. Loads tens of megabytes."""
    try:
        version()
    except Exception as error:  # CuPy's own types: no library, a wrong one, a broken one
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return (
            f"NVRTC cannot be loaded ({first}); pip install nvidia-cuda-nvrtc (CUDA 13) or "
            "nvidia-cuda-nvrtc-cu12, or set CUDA_PATH to a CUDA toolkit"
        )
    return ""


def _binding() -> Any:
    """CuPy's NVRTC module alone: the rest of CuPy is slow to import."""
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc


@lru_cache(maxsize=1)
def _headers() -> dict[bytes, bytes]:
    """The headers, by their name in an #include."""
    files = sorted(f for part in ("codec", "cuda") for f in (SOURCES / part).glob("*.h"))
    return {f.relative_to(SOURCES).as_posix().encode(): f.read_bytes() for f in files}


def _options(unit: Unit) -> tuple[str, ...]:
    told = (SOURCES / "cuda" / "nvcc_options.txt").read_text().split()
    rows = (f"-DZC_ROWS={unit.rows}",) if unit.rows else ()
    return (*(option for option in told if option not in _NVCC_ONLY), *rows)


def _key(unit: Unit, target: str) -> str:
    """A hash of everything that affects the result."""
    whole = hashlib.sha256(repr((version(), target, _options(unit))).encode())
    whole.update((SOURCES / "cuda" / f"{unit.file}.cu").read_bytes())
    for name, text in _headers().items():
        whole.update(name + b"\0" + text + b"\0")
    return whole.hexdigest()[:16]
