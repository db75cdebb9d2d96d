"""Every kernel set against a slow version of the wire format, one number at a time.

Python floats have more than twice the digits of fp32, so computing in double and rounding to fp32
is the same as rounding once.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch

from kernel_sets import KERNEL_SETS
from zcomm import codec
from zcomm.codecs.residual_storage import read
from zcomm.wire.lm_tables import LEVELS, SIGN_WORDS, THRESHOLDS

B = 32
UNIFORM = {"int8": (127, 0x7C01), "int4": (7, 0x7E12)}
WIDTHS = {"int8": 8, "fp8": 8, "int4": 4, "lm4": 4, "lm3": 3, "lm2": 2, "sign": 1}
NAN = math.nan


def f32(x: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def value(pattern: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", pattern << 16))[0])


def bf16(x: float) -> int:
    u = bits(x)
    return (u + 0x7FFF + ((u >> 16) & 1)) >> 16


def tree(t: list[float]) -> float:
    t = t + [0.0] * (1024 - len(t))
    while len(t) > 1:
        half = len(t) // 2
        t = [f32(t[i] + t[i + half]) for i in range(half)]
    return t[0]


def hadamard(t: list[float]) -> list[float]:
    t, h = list(t), 1
    while h < len(t):
        for i in range(len(t)):
            if not i & h:
                t[i], t[i + h] = f32(t[i] + t[i + h]), f32(t[i] - t[i + h])
        h *= 2
    return t


def sigma(i: int) -> float:
    return -1.0 if SIGN_WORDS[i // 64] >> (i % 64) & 1 else 1.0


def e4m3(code: int) -> float:
    e, m = (code >> 3) & 15, code & 7
    size = (8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9
    return -size if code & 0x80 else size


def to_e4m3(x: float) -> int:
    """The nearest of all 127 magnitudes; a tie goes to the even code."""
    size = Fraction(abs(x))
    best = min(range(0x7F), key=lambda c: (abs(Fraction(e4m3(c)) - size), c & 1))
    return best | (0x80 if bits(x) >> 31 else 0)


def uniform_block(name: str, v: list[float]) -> tuple[int, list[int]]:
    limit, cap = UNIFORM[name]
    scale = min(bf16(f32(max(map(abs, v)) / limit)), cap)
    if scale < 0x80:
        return 0, []
    inv = f32(1 / value(scale))
    codes = [max(-limit, min(limit, round(f32(x * inv)))) for x in v]
    return scale, [c & ((1 << WIDTHS[name]) - 1) for c in codes]


def fp8_block(v: list[float]) -> tuple[int, list[int]]:
    scale = min(bf16(f32(max(map(abs, v)) / 448)), 0x7B12)
    if scale < 0x80:
        return 0, []
    inv = f32(1 / value(scale))
    return scale, [to_e4m3(f32(x * inv)) for x in v]


def sign_block(v: list[float]) -> tuple[int, list[int]]:
    shift = 64 if max(map(abs, v)) >= 2.0**100 else 0
    mean = f32(tree([f32(abs(x) * 2.0**-shift) for x in v]) / len(v))
    scale = min(bf16(f32(mean * 2.0**shift)), 0x7F7F)
    return scale if scale >= 0x80 else 0, [bits(x) >> 31 for x in v]


def lm_block(name: str, v: list[float]) -> tuple[int, list[int]]:
    levels = LEVELS[WIDTHS[name]]
    e = max(map(bits, map(abs, v))) >> 23
    if not e:
        return 0, []
    p = max(254 - e, 1)
    size = 1 << (len(v) - 1).bit_length()
    padded = v + [0.0] * (size - len(v))
    y = hadamard([sigma(i) * f32(x * 2.0 ** (p - 127)) for i, x in enumerate(padded)])
    gain = f32(48 / f32(math.sqrt(f32(tree([f32(a * a) for a in y]) / size))))
    steps = [max(-128, min(127, math.floor(f32(a * gain)))) for a in y]
    cells = [sum(max(t, -1 - t) >= edge for edge in THRESHOLDS[WIDTHS[name]]) for t in steps]
    half = len(levels) // 2
    codes = [half + c if t >= 0 else half - 1 - c for c, t in zip(cells, steps)]
    q = [levels[c] for c in codes]
    t = f32(tree([f32(a * b) for a, b in zip(y, q)]) / tree([f32(a * a) for a in q]))
    return bf16(f32(f32(t / size) * 2.0 ** (121 - p if e >= 249 else 127 - p))), codes


def slow_block(name: str, v: list[float]) -> tuple[int, list[int]]:
    """Scale and codes; the codes of zero and NaN blocks are all 0."""
    count = 1 << (len(v) - 1).bit_length() if name.startswith("lm") else len(v)
    if not all(map(math.isfinite, v)):
        return 0x7FC0, [0] * count
    blocks = {"fp8": fp8_block, "sign": sign_block}
    if name in blocks:
        scale, codes = blocks[name](v)
    else:
        scale, codes = uniform_block(name, v) if name in UNIFORM else lm_block(name, v)
    return (scale, codes) if scale >= 0x80 else (0, [0] * count)


def slow_terms(name: str, scale: int, codes: list[int]) -> list[float]:
    if scale in (0, 0x7FC0):
        return [0.0 if scale == 0 else NAN] * len(codes)
    s = value(scale)
    if name in UNIFORM:
        half = 1 << (WIDTHS[name] - 1)
        return [f32(((c ^ half) - half) * s) for c in codes]
    if name == "fp8":
        return [f32(e4m3(c) * s) for c in codes]
    if name == "sign":
        return [-s if c else s for c in codes]
    return [f32(LEVELS[WIDTHS[name]][c] * s) for c in codes]


def slow_finish(name: str, z: list[float], m: int) -> list[float]:
    if not name.startswith("lm"):
        return z
    return [sigma(i) * x for i, x in enumerate(hadamard(z))][:m]


def up(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def slow_body(name: str, blocks: list[tuple[int, list[int]]]) -> bytes:
    width, codes = WIDTHS[name], b""
    for _, block in blocks:
        string = sum(code << (i * width) for i, code in enumerate(block))
        codes += string.to_bytes((len(block) * width + 7) // 8, "little")
    return up(b"".join(struct.pack("<H", scale) for scale, _ in blocks)) + up(codes)


def split(v: list[float]) -> list[list[float]]:
    return [v[i : i + B] for i in range(0, len(v), B)]


def same_bits(got: torch.Tensor, expected: list[float]) -> None:
    want = torch.tensor([0x7FC00000 if x != x else bits(x) for x in expected], dtype=torch.int64)
    assert torch.equal(got.view(torch.int32).to(torch.int64) & 0xFFFFFFFF, want)


def gradient(kind: str, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator)
    wide = torch.randint(-140, 120, (n,), generator=generator)
    table = {
        "normal": x,
        "wide": torch.ldexp(x.double(), wide.double()).float(),
        "tiny": x * 1e-38,
        "subnormal": x * 1e-41,
        "huge": x.clamp(-1, 1) * 3.4028234e38,
        "equal": torch.full((n,), 3.4028234e38),
        "zeros": x * 0.0,
        "ties": torch.round(x * 4) / 4,
        "nan in one block": torch.where(torch.arange(n) == n // 2, NAN, x),
        "inf in one block": torch.where(torch.arange(n) == n - 1, -math.inf, x),
    }
    return table[kind]


KINDS = ["normal", "wide", "tiny", "subnormal", "huge", "equal", "zeros", "ties"]
KINDS += ["nan in one block", "inf in one block"]


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 71])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_block_codec_is_the_formula(kernels: str, name: str, kind: str, n: int) -> None:
    c, x = codec(f"{name}:block={B}"), gradient(kind, n)
    old = x.clone() if kind == "zeros" else gradient("normal", n + 1)[1:] * 0.01
    residual = old.clone()
    wire = c.encode(x, residual, prescale=0.3, kernels=kernels)
    factor = f32(0.3)
    v = [f32(f32(g * factor) + r) for g, r in zip(x.tolist(), old.tolist())]
    blocks = [slow_block(name, part) for part in split(v)]
    assert bytes(wire[32:].tolist()) == slow_body(name, blocks)
    decoded: list[float] = []
    for part, (scale, codes) in zip(split(v), blocks):
        decoded += slow_finish(name, slow_terms(name, scale, codes), len(part))
    same_bits(c.decode(wire, n, kernels=kernels), decoded)
    kept = [b == 0x7FC0 for b, _ in blocks]
    zero = [b == 0 for b, _ in blocks]
    same_bits(
        residual,
        [
            r if kept[i // B] else a if zero[i // B] else f32(a - d)
            for i, (r, a, d) in enumerate(zip(old.tolist(), v, decoded))
        ],
    )


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_sum_is_taken_in_order_before_the_inverse(kernels: str, name: str) -> None:
    c, n = codec(f"{name}:block={B}"), 71
    inputs = [gradient(kind, n) for kind in ("zeros", "normal", "ties", "wide")]
    wires = [c.encode(x, kernels=kernels) for x in inputs]
    expected: list[float] = []
    for b in range(0, n, B):
        parts = [slow_block(name, x.tolist()[b : b + B]) for x in inputs]
        total = slow_terms(name, *parts[0])
        for part in parts[1:]:
            total = [f32(a + t) for a, t in zip(total, slow_terms(name, *part))]
        expected += slow_finish(name, total, min(B, n - b))
    same_bits(c.decode_sum(wires, n, kernels=kernels), expected)
    same_bits(c.decode_sum(torch.stack(wires), n, kernels=kernels), expected)


def slow_plain(name: str, x: float) -> bytes:
    if name == "none":
        return struct.pack("<I", 0x7FC00000 if x != x else bits(x))
    if x != x:
        return struct.pack("<H", 0x7FC0 if name == "bf16" else 0x7E00)
    if name == "bf16":
        pattern = bf16(x)
        over = math.isfinite(x) and pattern & 0x7FFF == 0x7F80
        return struct.pack("<H", pattern - 1 if over else pattern)
    try:
        return struct.pack("<e", x)
    except OverflowError:
        return struct.pack("<H", 0x7BFF | (0x8000 if x < 0 else 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_plain_codec_is_the_formula(kernels: str, name: str, kind: str) -> None:
    c, n = codec(name), 71
    x = torch.cat((gradient(kind, n - 3), torch.tensor([65519.0, 65520.0, -(2.0**-25)])))
    residual = torch.full((n,), 0.5)
    wire = c.encode(x, residual, kernels=kernels)
    v = [f32(a + 0.5) for a in x.tolist()]
    assert bytes(wire[32:].tolist()) == up(b"".join(slow_plain(name, a) for a in v))
    d = c.decode(wire, n, kernels=kernels)
    expected = [f32(a - b) if math.isfinite(a) else 0.5 for a, b in zip(v, d.tolist())]
    same_bits(residual, expected)


@pytest.mark.parametrize("kind", [*KINDS, "two ranges"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_topk_is_the_formula(kernels: str, kind: str) -> None:
    n = 65536 + 100 if kind == "two ranges" else 71
    x = gradient("ties" if kind == "two ranges" else kind, n)
    c, residual = codec("topk:0.3"), torch.zeros(n)
    wire, k = c.encode(x, residual, kernels=kernels), -(-3 * n // 10)
    v = [f32(a + 0.0) for a in x.tolist()]
    ranges = range(0, n, 65536)
    if not all(map(math.isfinite, v)):
        body = up(b"\xff" * 4 * len(ranges)) + 2 * bytes(len(up(bytes(2 * k))))
        expected, left = [NAN] * n, [0.0] * n
    else:
        sent = sorted(sorted(range(n), key=lambda i: (-abs(v[i]), i))[:k])
        counts = [sum(r <= i < r + 65536 for i in sent) for r in ranges]
        body = up(struct.pack(f"<{len(counts)}I", *counts))
        body += up(struct.pack(f"<{k}H", *(i % 65536 for i in sent)))
        values = [struct.unpack("<H", slow_plain("bf16", v[i]))[0] for i in sent]
        values = [0 if u == 0x8000 else u for u in values]  # -0 is sent as +0
        body += up(struct.pack(f"<{k}H", *values))
        expected = [0.0] * n
        for i, u in zip(sent, values):
            expected[i] = value(u)
        left = [f32(a - d) for a, d in zip(v, expected)]
    assert bytes(wire[32:].tolist()) == body
    same_bits(c.decode(wire, n, kernels=kernels), expected)
    same_bits(residual, left)


@pytest.mark.parametrize("name", ["none", "fp16", "int4", "lm3", "sign", "topk:0.3"])
@pytest.mark.parametrize("kind", ["normal", "tiny", "huge", "nan in one block"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_int8_residual_is_an_int8_body(kernels: str, kind: str, name: str) -> None:
    block = 32 if name in WIDTHS else 128
    c, n = codec(f"{name}:block=32" if name in WIDTHS else name), 171
    stored = c.new_residual(n, torch.int8)
    c.encode(gradient("normal", n), stored, kernels=kernels)
    before = stored.clone()
    exact = read(before, n, c.block).clone()
    c.encode(gradient(kind, n), exact, kernels=kernels)
    wire = c.encode(gradient(kind, n), stored, kernels=kernels)
    again = read(before, n, c.block).clone()
    assert torch.equal(wire, c.encode(gradient(kind, n), again, kernels=kernels))
    # Blocks with an unchanged residual encode to the same bytes again.
    body = codec(f"int8:block={block}").encode(exact, kernels=kernels)[32:]
    assert torch.equal(stored.view(torch.uint8), body)


@pytest.mark.parametrize("name", ["bf16", "int8", "lm4", "topk:0.3"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_bf16_residual_is_rounded(kernels: str, name: str) -> None:
    c, n = codec(name), 171
    stored, exact = torch.full((n,), 0.01, dtype=torch.bfloat16), torch.full((n,), 0.01).bfloat16()
    wide, x = exact.float(), gradient("normal", n)
    assert torch.equal(c.encode(x, stored, kernels=kernels), c.encode(x, wide, kernels=kernels))
    assert torch.equal(stored, wide.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["lm4", "lm3", "lm2"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_largest_number_alone_in_a_block_decodes_finite(kernels: str, name: str) -> None:
    x = gradient("equal", B + 1)
    wire = codec(f"{name}:block={B}").encode(x, kernels=kernels)
    assert bytes(wire[32:].tolist()) == slow_body(
        name, [slow_block(name, p) for p in split(x.tolist())]
    )
    assert codec(f"{name}:block={B}").decode(wire, B + 1, kernels=kernels).isfinite().all()


@pytest.mark.parametrize("size", [1, 2, 32, 1024])
@pytest.mark.parametrize("name", ["lm4", "lm3", "lm2"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_rotation_is_the_hadamard_matrix(kernels: str, name: str, size: int) -> None:
    """d against sigma * (matrix . z) in exact arithmetic: at most log2(b) roundings per path."""
    c, x = codec(f"{name}:block={max(size, 32)}"), gradient("normal", size)
    wire = c.encode(x, kernels=kernels)
    scale, codes = slow_block(name, x.tolist())
    z = [Fraction(t) for t in slow_terms(name, scale, codes)]
    bound = (size.bit_length() - 1) * sum(map(abs, z)) * Fraction(2) ** -24 * Fraction(101, 100)
    for i, d in list(enumerate(c.decode(wire, size, kernels=kernels).tolist()))[:64]:
        exact = sum(t if (i & j).bit_count() % 2 == 0 else -t for j, t in enumerate(z))
        assert abs(Fraction(d) - int(sigma(i)) * exact) <= bound


@pytest.mark.parametrize("name", [*WIDTHS, "none", "bf16", "fp16", "topk:0.3"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_flushed_denormals_change_nothing(kernels: str, name: str) -> None:
    n = 70000
    c, x = codec(name), gradient("tiny", n)
    residual = c.new_residual(n)
    wire = c.encode(x, residual, kernels=kernels)
    total, flushed = c.decode_sum([wire, wire], n, kernels=kernels), c.new_residual(n)
    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(c.encode(x, flushed, kernels=kernels), wire)
        again = c.decode_sum([wire, wire], n, kernels=kernels)
        half = torch.full((1,), 0x00800000, dtype=torch.int32).view(torch.float32) * 0.5
        assert half.view(torch.int32).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.get_num_threads() == threads
    assert torch.equal(again.view(torch.int32), total.view(torch.int32))
    assert torch.equal(flushed.view(torch.int32), residual.view(torch.int32))
