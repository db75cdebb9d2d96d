"""Codec objects: specs, sizes, immutability, threads, and the choice of kernels."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

import zcomm
from kernel_sets import KERNEL_SETS, SPECS
from zcomm import Codec, codec
from zcomm import kernels as kernel_sets
from zcomm.kernels import cpu

IDS = ["none", "bf16", "fp16", "int8", "fp8", "int4", "lm4", "lm3", "lm2", "sign"]


@pytest.mark.parametrize("spec", SPECS)
def test_codec_of_its_own_spec_is_equal(spec: str) -> None:
    c = codec(spec)
    assert codec(c) is c
    assert codec(c.spec) == c
    assert hash(codec(c.spec)) == hash(c)
    assert repr(c) == f"codec({c.spec!r})"
    assert pickle.loads(pickle.dumps(c)) == c
    assert copy.deepcopy(c) == c


def test_ids_are_those_of_the_format() -> None:
    assert [codec(name).id for name in IDS] == list(range(1, 11))
    assert codec("topk:1").id == 11


def test_default_block_is_left_out_of_the_spec() -> None:
    assert codec("int8:block=128").spec == "int8"
    assert codec("int8:block=128") == codec("int8")
    assert codec("int8:block=256") != codec("int8")
    assert (codec("int8").block, codec("int8").log2_block) == (128, 7)
    assert (codec("lm4:block=1024").block, codec("lm4:block=1024").log2_block) == (1024, 10)
    assert (codec("none").block, codec("none").log2_block) == (0, 0)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("0.01", "0.01"),
        ("0.010", "0.01"),
        ("1e-2", "0.01"),
        (".5", "0.5"),
        ("1", "1"),
        ("1.0", "1"),
    ],
)
def test_topk_ratio_is_canonical(given: str, canonical: str) -> None:
    assert codec(f"topk:{given}").spec == f"topk:{canonical}"


@pytest.mark.parametrize("spec", ["", "lm5", "LM4", "topk=0.1", "int8 "])
def test_unknown_name_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of none, bf16, .*, topk, got"):
        codec(spec)


@pytest.mark.parametrize(
    "option", ["", "block", "block=", "block=16", "block=2048", "block=100", "block=+64", "size=64"]
)
@pytest.mark.parametrize("name", ["int8", "lm3"])
def test_bad_block_option_is_refused(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=rf"codec {name}: expected the option block=.*got"):
        codec(f"{name}:{option}")


@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
def test_codec_without_blocks_takes_no_option(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected no option, got 'block=64'"):
        codec(f"{name}:block=64")


@pytest.mark.parametrize("spec", ["topk", "topk:", "topk:0", "topk:0.0", "topk:1.01", "topk:-0.1"])
@pytest.mark.parametrize("suffix", ["", "x", "/2"])
def test_bad_ratio_is_refused(spec: str, suffix: str) -> None:
    with pytest.raises(ValueError, match=r"expected (topk:R with a decimal|one of none)"):
        codec(spec + suffix)


@pytest.mark.parametrize("spec", ["topk:nan", "topk:inf", "topk:1e-100", "topk:1/2", "topk:0.1,2"])
def test_ratio_that_is_no_short_decimal_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="expected topk:R"):
        codec(spec)


def test_topk_alone_asks_for_a_ratio() -> None:
    with pytest.raises(ValueError, match=r"such as topk:0\.01, got no ratio"):
        codec("topk")


def test_spec_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a spec such as 'lm4' or a Codec, got 4"):
        codec(4)  # type: ignore[arg-type]


def test_codec_is_immutable() -> None:
    c = codec("lm4")
    with pytest.raises(AttributeError, match="immutable"):
        c.name = "other"
    with pytest.raises(AttributeError, match="immutable"):
        c.anything = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="immutable"):
        del c.spec


@pytest.mark.parametrize("n", [0, 1, 99, 100, 101, 10**7, 10**12 + 1])
@pytest.mark.parametrize("ratio", ["0.01", "0.1", "0.3", "1", "0.000001"])
def test_k_is_the_exact_ceiling(n: int, ratio: str) -> None:
    exact = Fraction(ratio) * n
    k = codec(f"topk:{ratio}").k(n)
    assert exact <= k < exact + 1


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


@pytest.mark.parametrize("n", [0, 1, 5, 31, 128, 129, 300, 65536, 65537])
def test_body_sizes(n: int) -> None:
    blocks = -(-n // 128)
    last = n % 128
    padded = 1 << (last - 1).bit_length() if last else 0
    assert codec("none").body_nbytes(n) == _up(4 * n)
    assert codec("bf16").body_nbytes(n) == codec("fp16").body_nbytes(n) == _up(2 * n)
    assert codec("int8").body_nbytes(n) == codec("fp8").body_nbytes(n) == _up(2 * blocks) + _up(n)
    assert codec("int4").body_nbytes(n) == _up(2 * blocks) + _up(-(-n // 2))
    assert codec("sign").body_nbytes(n) == _up(2 * blocks) + _up(-(-n // 8))
    for name, width in (("lm4", 4), ("lm3", 3), ("lm2", 2)):
        codes = n // 128 * 16 * width + -(-padded * width // 8)
        assert codec(name).body_nbytes(n) == _up(2 * blocks) + _up(codes)
    ranges, k = -(-n // 65536), -(-n // 100)
    assert codec("topk:0.01").body_nbytes(n) == _up(4 * ranges) + 2 * _up(2 * k)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [0, 1, 130])
def test_wire_and_residual_sizes(spec: str, n: int) -> None:
    c = codec(spec)
    assert c.wire_nbytes(n) == 32 + c.body_nbytes(n)
    assert c.residual_numel(n, torch.float32) == c.residual_numel(n, torch.bfloat16) == n
    stored = codec(f"int8:block={c.block or 128}").body_nbytes(n)
    assert c.residual_numel(n, torch.int8) == stored
    residual = c.new_residual(n, torch.int8)
    assert residual.dtype == torch.int8
    assert not residual.any()


def test_sizes_refuse_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"expected .* n >= 0, got -1"):
        codec("int8").wire_nbytes(-1)
    with pytest.raises(ValueError, match=r"n >= 0, got -1"):
        codec("int8").decode(torch.zeros(32, dtype=torch.uint8), -1, kernels="reference")
    with pytest.raises(
        ValueError, match=r"expected residual dtype torch.float32, .* or torch.int8"
    ):
        codec("int8").new_residual(4, torch.float16)


X = torch.arange(6.0)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_and_a_tensor_that_requires_grad(kernels: str, dtype: torch.dtype) -> None:
    c = codec("int8")
    x = torch.randn(3, 5, 7).to(dtype).requires_grad_()
    wire = c.encode(x, kernels=kernels)
    flat = c.encode(x.detach().reshape(-1), kernels=kernels)
    assert torch.equal(wire, flat)
    out = torch.empty(3, 5, 7)
    assert c.decode(wire, 105, out=out, kernels=kernels) is out
    assert torch.equal(out.view(-1), c.decode(wire, 105, kernels=kernels))
    target = torch.empty_like(wire)
    assert c.encode(x, out=target, kernels=kernels) is target


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_every_call_takes_threads(kernels: str) -> None:
    c, x = codec("lm4"), torch.randn(200_000)
    wire = c.encode(x, kernels=kernels)
    for threads in (1, 3, 1024):
        assert torch.equal(c.encode(x, threads=threads, kernels=kernels), wire)
        decoded = c.decode(wire, x.numel(), threads=threads, kernels=kernels)
        summed = c.decode_sum([wire], x.numel(), threads=threads, kernels=kernels)
        assert torch.equal(decoded, summed)


def test_kernels_by_unknown_name_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of reference, cpu, .*, got 'gpu'"):
        codec("int8").encode(X, kernels="gpu")
    with pytest.raises(TypeError, match=r"expected one of reference, cpu, .*, got list"):
        codec("int8").encode(X, kernels=["cpu"])  # type: ignore[arg-type]
    absent = [name for name, reason in zcomm.available_kernels().items() if reason]
    for name in set(absent) - set(kernel_sets.ON_GPUS):  # GPU sets do not take CPU tensors
        with pytest.raises(RuntimeError, match=f"kernels {name} are absent: "):
            codec("int8").encode(X, kernels=name)


@pytest.fixture
def kernel_choice() -> Iterator[None]:
    """Forgets the choice of kernels, before and after the test."""
    kernel_sets._select.cache_clear()
    yield
    kernel_sets._select.cache_clear()


@pytest.mark.usefixtures("kernel_choice")
def test_environment_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_KERNELS", "reference")
    assert kernel_sets.select(torch.device("cpu")).name == "reference"
    monkeypatch.setenv("ZCOMM_KERNELS", "other")
    kernel_sets._select.cache_clear()
    with pytest.raises(ValueError, match=r"ZCOMM_KERNELS: expected one of reference, .* 'other'"):
        kernel_sets.select(torch.device("cpu"))


@pytest.mark.usefixtures("kernel_choice")
def test_environment_names_the_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa, reason in ((isa, zcomm.available_kernels()[f"cpu:{isa}"]) for isa in cpu.ISAS):
        monkeypatch.setenv("ZCOMM_CPU_ISA", isa)
        kernel_sets._select.cache_clear()
        assert zcomm.available_kernels()["cpu"] == reason
        if not reason:
            assert kernel_sets.select(torch.device("cpu"), "cpu").name == f"cpu:{isa}"


@pytest.mark.usefixtures("kernel_choice")
def test_misspelt_isa_is_a_reason_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZCOMM_KERNELS", raising=False)
    present = zcomm.available_kernels()
    monkeypatch.setenv("ZCOMM_CPU_ISA", "sse")
    message = "ZCOMM_CPU_ISA: expected one of scalar, avx2, avx512, got 'sse'"
    assert zcomm.available_kernels() == {**present, "cpu": message}
    for name in ("cpu", None):
        with pytest.raises(ValueError, match=message):
            codec("int8").encode(X, kernels=name)
    codec("int8").encode(X, kernels="reference")


@pytest.mark.usefixtures("kernel_choice")
def test_missing_native_core_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZCOMM_KERNELS", raising=False)
    monkeypatch.setattr(cpu, "_load", lambda: "zcomm._core cannot be imported: no such file")
    with pytest.raises(RuntimeError, match=r"kernels cpu are absent: .*no such file"):
        codec("int8").encode(X)
    with pytest.raises(ValueError, match="kernels cpu: expected tensors on cpu, got cuda"):
        kernel_sets.select(torch.device("cuda"), "cpu")


def test_public_names() -> None:
    assert isinstance(codec("lm4"), Codec)
    assert zcomm.__version__ == "0.1.0"
    assert all(hasattr(zcomm, name) for name in zcomm.__all__)
