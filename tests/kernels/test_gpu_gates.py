"""Gates on the CUDA kernels: the shipped machine code, and the bytes that kernels move.

These run in seconds. `make gpu-report` covers all architectures, codecs and sizes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import emulated

TOOLS = emulated.ROOT / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

from gpu import gates, machine_code, traffic  # noqa: E402

ELEMENTS = 2**15
DISASSEMBLED = (90,)

needs_nvcc = pytest.mark.skipif(emulated.NVCC is None, reason=emulated.NO_NVCC)
needs_tools = pytest.mark.skipif(bool(machine_code.missing()), reason=machine_code.missing())


# ---- The shipped object ----


@pytest.fixture(scope="module")
def module() -> Path:
    found = importlib.util.find_spec("zcomm._cuda")
    if found is None or found.origin is None:
        pytest.skip("zcomm._cuda is not there: zcomm was built without nvcc")
    return Path(found.origin)


@needs_tools
def test_the_object_has_all_architectures_and_ptx(module: Path) -> None:
    assert gates.architecture_failures(module) == []


@needs_tools
def test_kernels_fit_into_registers(module: Path) -> None:
    assert gates.resource_failures(machine_code.resources(module)) == []


@needs_tools
def test_memory_is_accessed_in_128_bits_and_never_locally(module: Path) -> None:
    found = machine_code.opcodes(module, DISASSEMBLED)
    assert gates.instruction_failures(found, DISASSEMBLED) == []


# ---- Bytes ----


@cache
def counter() -> traffic.Counter:
    return traffic.Counter(emulated.load(emulated.Build(arch=80)))


@needs_nvcc
@pytest.mark.parametrize("spec", ["none", "int4", "lm4", "topk:0.01"])
def test_bytes_are_near_the_least(spec: str) -> None:
    counted = [counter().count(call) for call in traffic.calls(spec, ELEMENTS)]
    assert [one.failure for one in counted if one.failure] == []
    # The minimum possible: a smaller figure would be a miscount. topk need not read twice.
    if spec != "topk:0.01":
        assert min(one.ratio for one in counted) >= 1


@needs_nvcc
def test_shuffles_are_counted() -> None:
    """For none, a warp sums the checksum of its 2048 elements: two words in five strides."""
    counted = counter().count(traffic.calls("none", ELEMENTS)[0])
    assert counted.shuffles == 2 * 5 * ELEMENTS // 2048


# ---- The gates themselves ----

# A local array that is read at a run-time index cannot live in registers.
SPILLING = """
extern "C" __global__ void zc_find_idle(float4* x, const int* at) {
  float local[32];
  for (int i = 0; i < 32; ++i) local[i] = x[i].x;
  float sum = 0;
  for (int i = 0; i < 32; ++i) sum += local[at[i] & 31];
  x[threadIdx.x].y = sum;
}
"""


@needs_nvcc
@needs_tools
def test_what_a_bad_kernel_is_refused_for(tmp_path: Path) -> None:
    source, path = tmp_path / "bad.cu", tmp_path / "bad.so"
    source.write_text(SPILLING)
    options = ["-shared", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90,code=sm_90"]
    subprocess.run([str(emulated.NVCC), *options, str(source), "-o", str(path)], check=True)
    wrong = gates.failures(path, DISASSEMBLED)
    kernel = "zc_find_idle sm_90: expected"
    assert "architectures: expected [75, 80, 90, 100, 120], got [90]" in wrong
    assert "PTX: expected that of 120, got []" in wrong
    assert f"{kernel} all in registers, got 128 bytes of stack" in wrong
    assert any(line.startswith(f"{kernel} no LDL or STL, got ") for line in wrong)
    assert f"{kernel} LDG of 128 bits, got none" in wrong
    assert "zc_encode_int4_1 sm_90: expected STG of 128 bits, got none" in wrong
    assert any(line.startswith("sm_75: expected 69 kernels, got 0: ") for line in wrong)


def test_a_kernel_with_too_many_registers_is_refused() -> None:
    found = [
        machine_code.Resources(kernel, arch, cap, 0, 0)
        for kernel, (cap, _) in gates.expected_kernels().items()
        for arch in gates.ARCHITECTURES
    ]
    assert gates.resource_failures(found) == []
    one = found[0]
    found[0] = machine_code.Resources(one.kernel, one.arch, one.registers + 1, 0, 0)
    expected = f"expected at most {one.registers} registers, got {one.registers + 1}"
    assert gates.resource_failures(found) == [f"{one.kernel} sm_{one.arch}: {expected}"]


def test_opcodes_are_told_by_name_and_modifier() -> None:
    opcodes = Counter({"LDG.E.128.CONSTANT": 2, "LDG.E.64": 3, "LD.E.128": 4, "LDL.LU": 1})
    assert gates.count(opcodes, "LDG", "128") == 2
    assert gates.count(opcodes, "LDG") == 5
    assert gates.count(opcodes, "LDL") == 1


def test_too_many_bytes_are_refused() -> None:
    call = traffic.Call("int4", 128, wires=1)
    assert call.minimum == 4 * 128 + 32 + 16 + 64
    assert traffic.Traffic(call, 86, 600, 0).failure == ""
    assert "expected at most 1.1 times the least bytes, got 1.101" in (
        traffic.Traffic(call, 87, 600, 0).failure
    )
