"""What we can tell about GPU kernels without a GPU: `python tools/gpu_report.py [--triton]`.

Reports registers and instructions of the shipped machine code, bytes counted by the emulator, and
the predicted time. Exits with status 1 if a gate fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "emulator"))

from gpu import gates, machine_code, roofline, traffic, triton_gates  # noqa: E402

import emulated  # noqa: E402
import emulated_triton  # noqa: E402
from triton_compiler import Target  # noqa: E402
from zcomm.codecs import SPECS  # noqa: E402

SIZES = (2**17, 2**17 + 12345)
PREDICTED = ("encode fp32, fp32 residual", "decode_sum of 4")


def registers(path: Path) -> Iterator[str]:
    yield "Registers of a thread, by architecture; no kernel may use a stack"
    rows = [("kernel", "at most", *(f"sm_{arch}" for arch in gates.ARCHITECTURES))]
    found = {(r.kernel, r.arch): str(r.registers) for r in machine_code.resources(path)}
    for kernel, (cap, _) in gates.expected_kernels().items():
        figures = [found.get((kernel, arch), "-") for arch in gates.ARCHITECTURES]
        rows.append((kernel, str(cap), *figures))
    yield from table(rows)


def moved(counted: Sequence[traffic.Traffic]) -> Iterator[str]:
    yield f"Bytes per element of one segment of {SIZES[0]} elements, in sectors of 32 bytes"
    yield "(the least: everything once; topk: its five passes over the input, entries twice)"
    head = ("codec", "call", "least", "counted", "ratio", f"ratio at {SIZES[1]}", "at most")
    rows = [(*head, "shuffles")]
    for first, second in zip(counted[::2], counted[1::2]):
        call = first.call
        figures = (call.minimum / call.n, first.nbytes / call.n, first.ratio, second.ratio)
        shuffles = 32 * first.shuffles / call.n
        rows.append((call.spec, call.name, *map("{:.3f}".format, (*figures, call.limit, shuffles))))
    yield from table(rows)


def predictions(counted: Sequence[traffic.Traffic]) -> Iterator[str]:
    yield f"Microseconds for {roofline.ELEMENTS:,} elements"
    yield "prediction: bytes / memory bandwidth; not measured"
    yield "(or the shuffle limit, where that is more: one of a warp per cycle and multiprocessor)"
    for gpu in roofline.GPUS:
        yield f"  {gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.multiprocessors} SM, " + (
            f"{gpu.clock_hz / 1e9:.2f} GHz"
        )
    names = [name for gpu in roofline.GPUS for name in (gpu.name, "shuffle limit")]
    rows = [("codec", "call", *names)]
    for one in counted[::2]:
        if one.call.name in PREDICTED:
            found = [roofline.predicted(one, gpu) for gpu in roofline.GPUS]
            times = [time for p in found for time in (p.seconds, p.shuffle_s)]
            rows.append((one.call.spec, one.call.name, *(f"{time * 1e6:.0f}" for time in times)))
    yield from table(rows)


def triton_registers(found: Sequence[triton_gates.Use]) -> Iterator[str]:
    yield "Registers of a thread in Triton's kernels, by GPU; none may spill"
    yield from table(list(triton_gates.rows(found)))


def triton_uses() -> list[triton_gates.Use]:
    """The resources of every variant on every kind of GPU; compiles variants if needed."""
    targets = [Target("cuda", arch) for arch in triton_gates.NVIDIA]
    targets += [Target("hip", arch) for arch in triton_gates.AMD]
    names = emulated_triton.all_names()
    found: list[triton_gates.Use] = []
    for target in targets:
        kernels = replace(emulated_triton.zcomm_kernels(target), assembled=True)
        found += triton_gates.uses(target.name, kernels.compiled(names))
    return found


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligns text columns left and number columns right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = [column[-1][:1].isalpha() for column in zip(*rows)]
    yield ""
    for row in rows:
        cells = zip(row, widths, left)
        line = "  ".join(c.ljust(w) if is_text else c.rjust(w) for c, w, is_text in cells)
        yield line.rstrip()
    yield ""


def count_all(arch: int) -> list[traffic.Traffic]:
    """Every call at both sizes, one after the other."""
    counter = traffic.Counter(emulated.load(emulated.Build(arch=arch)))
    both = [zip(*(traffic.calls(spec, n) for n in SIZES)) for spec in SPECS]
    return [counter.count(call) for pairs in both for pair in pairs for call in pair]


def installed_module() -> Path:
    found = importlib.util.find_spec("zcomm._cuda")
    if found is None or found.origin is None:
        sys.exit("expected zcomm._cuda, got none: build zcomm where nvcc is, or give --module")
    return Path(found.origin)


def triton_report() -> int:
    if not emulated_triton.FOUND:
        sys.exit("expected triton, got none: pip install -r requirements-dev.txt")
    found = triton_uses()
    wrong = [use.failure for use in found if use.failure]
    print(*triton_registers(found), sep="\n")
    print(*wrong or ["No kernel of Triton's spills."], sep="\n")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", type=Path, help="a shared object with the kernels")
    parser.add_argument("--arch", type=int, default=80, help="whose PTX the emulator runs")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels instead")
    args = parser.parse_args()
    if args.triton:
        return triton_report()
    path = args.module or installed_module()
    counted = count_all(args.arch)
    wrong = [*gates.failures(path), *filter(None, (one.failure for one in counted))]
    for part in (registers(path), moved(counted), predictions(counted)):
        print(*part, sep="\n")
    print(*wrong or ["All gates passed."], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
