"""CuPy arrays as arguments. CuPy cannot create arrays without a GPU, so stand-ins in CPU memory
have their interface, and streams are only recorded. One test checks that CuPy has those names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm import Layout, Residuals, Segment, codec
from zcomm.base import cupy_arrays

SPEC, N = "int8", 700


class Device:
    def __init__(self, ordinal: int, log: list[Any]) -> None:
        self.id, self._log = ordinal, log

    def __enter__(self) -> None:
        self._log.append(("device", self.id))

    def __exit__(self, *_: object) -> None:
        self._log.append(("device ends", self.id))


class FakeCupy:
    """The part of the module that zcomm uses."""

    def __init__(self) -> None:
        log: list[Any] = []
        self.log, self.stream = log, 0x5000

        class ndarray:
            def __init__(self, tensor: Tensor, ordinal: int = 1) -> None:
                self.tensor, self.device = tensor, Device(ordinal, log)
                self.flags = SimpleNamespace(c_contiguous=tensor.is_contiguous())
                self.strides = tuple(s * tensor.element_size() for s in tensor.stride())

            def __dlpack__(self, **_: object) -> Any:
                return self.tensor.__dlpack__()

            def __dlpack_device__(self) -> Any:
                return self.tensor.__dlpack_device__()

        self.ndarray = ndarray
        self.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=self.stream))

    def from_dlpack(self, tensor: Tensor) -> Any:
        return self.ndarray(torch.from_dlpack(tensor))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        fake.log.append(("stream", chosen))
        yield
        fake.log.append(("stream ends", chosen))

    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda ordinal: ("default", ordinal))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: (ptr, device))
    return fake


def gradient(n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(3))


def test_encode_and_decode_give_cupy_arrays(cupy: FakeCupy) -> None:
    c, x = codec(SPEC), gradient()
    wire = c.encode(cupy.ndarray(x))  # type: ignore[arg-type]
    assert type(wire) is cupy.ndarray
    assert torch.equal(wire.tensor, c.encode(x))
    for decoded in (c.decode(wire, N), c.decode_sum([wire], N), c.decode_sum((wire,), N)):
        assert type(decoded) is cupy.ndarray
        assert torch.equal(decoded.tensor, c.decode(c.encode(x), N))
    rows = cupy.ndarray(torch.stack([wire.tensor, wire.tensor]))
    total = c.decode_sum(rows, N)  # type: ignore[arg-type]
    assert torch.equal(total.tensor, c.decode_sum([wire.tensor] * 2, N))


def test_residuals_and_outputs_are_overwritten_where_they_lie(cupy: FakeCupy) -> None:
    c, x = codec(SPEC), gradient(N).view(7, 100)
    expected_residual = torch.ones(7, 100)
    expected = c.encode(x, expected_residual)
    residual = cupy.ndarray(torch.ones(7, 100))
    out = cupy.ndarray(torch.empty(c.wire_nbytes(N), dtype=torch.uint8))
    assert c.encode(cupy.ndarray(x), residual, out=out) is out  # type: ignore[arg-type]
    assert torch.equal(out.tensor, expected)
    assert torch.equal(residual.tensor, expected_residual)
    total = cupy.ndarray(torch.empty(7, 100))
    assert c.decode(out, N, out=total) is total  # type: ignore[arg-type]
    assert torch.equal(total.tensor.flatten(), c.decode(expected, N))


def test_layouts_take_them_too(cupy: FakeCupy) -> None:
    layout = Layout([Segment(codec("lm4"), 500, 0, 0), Segment(codec("none"), 200, 500, 1)])
    x, flat = gradient(), torch.zeros(N)
    expected = layout.encode(x, flat)
    split = torch.zeros(N)
    each = [cupy.ndarray(split[:500]), None]
    for residuals in (
        cupy.ndarray(torch.zeros(N)),
        Residuals(layout, cupy.ndarray(torch.zeros(N))),  # type: ignore[arg-type]
        Residuals(layout, each, [cupy.ndarray(torch.zeros(500)), None]),  # type: ignore[list-item]
        each,
    ):
        wire: Any = layout.encode(cupy.ndarray(x), residuals)  # type: ignore[arg-type]
        assert torch.equal(wire.tensor, expected)
    assert torch.equal(split[:500], flat[:500])
    frame: Any = layout.frame(wire, 0)
    assert torch.equal(frame.tensor, layout.frame(expected, 0))
    total: Any = layout.decode_sum([wire, wire])
    assert torch.equal(total.tensor, layout.decode_sum([expected, expected]))
    assert type(layout.decode(wire)) is cupy.ndarray


@pytest.mark.parametrize(
    ("handle", "stream"),
    [(0, ("default", 1)), (1, ("default", 1)), (0x7F00, (0x7F00, 1))],
)
def test_work_goes_to_cupys_current_stream(handle: int, stream: object, cupy: FakeCupy) -> None:
    """The current stream of the array's device; it does not stay current afterward."""
    cupy.stream = handle
    codec(SPEC).encode(cupy.ndarray(gradient()))  # type: ignore[arg-type]
    asked = [("device", 1), ("device ends", 1)]
    assert cupy.log == [*asked, ("stream", stream), ("stream ends", stream)]


def test_the_per_thread_default_stream_is_refused(cupy: FakeCupy) -> None:
    cupy.stream = 2
    with pytest.raises(ValueError, match="got the per-thread default stream, which torch cannot"):
        codec(SPEC).encode(cupy.ndarray(gradient()))  # type: ignore[arg-type]


def test_torch_without_cuda_is_refused(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="expected a torch with CUDA for CuPy arrays, got torch"):
        codec(SPEC).encode(cupy.ndarray(gradient()))  # type: ignore[arg-type]


def test_arrays_and_tensors_are_not_mixed(cupy: FakeCupy) -> None:
    c, x = codec(SPEC), gradient()
    array, wire = cupy.ndarray(x), c.encode(x)
    residual = torch.zeros(N)
    with pytest.raises(TypeError, match="residual: expected a CuPy array like the other"):
        c.encode(array, residual)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out: expected a CuPy array"):
        c.decode(cupy.ndarray(wire), N, out=torch.empty(N))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wires 1: expected a CuPy array"):
        c.decode_sum([cupy.ndarray(wire), wire], N)  # type: ignore[list-item]
    for call in (
        lambda: c.encode(x, cupy.ndarray(residual)),  # type: ignore[arg-type]
        lambda: c.decode_sum([wire, cupy.ndarray(wire)], N),  # type: ignore[list-item]
        lambda: c.decode(wire, N, out=cupy.ndarray(torch.empty(N))),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"got a CuPy array; .* use torch\.from_dlpack\(array"):
            call()
    assert torch.equal(residual, torch.zeros(N))


def test_what_does_not_fit_is_refused_with_a_remedy(cupy: FakeCupy) -> None:
    c = codec(SPEC)
    with pytest.raises(ValueError, match=r"x: expected contiguous memory, .*ascontiguousarray"):
        c.encode(cupy.ndarray(gradient().view(70, 10).T))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"gradient: expected torch\.float32, .* got torch\.float64"
    ):
        c.encode(cupy.ndarray(gradient().double()))  # type: ignore[arg-type]
    with pytest.raises(zcomm.WireError, match="wire 0: expected 752 bytes, got 700"):
        c.decode(cupy.ndarray(torch.zeros(N, dtype=torch.uint8)), N)  # type: ignore[arg-type]


def test_a_list_may_begin_with_nothing(cupy: FakeCupy) -> None:
    wire = cupy.ndarray(codec(SPEC).encode(gradient()))
    with pytest.raises(TypeError, match="wire 0: expected a tensor, got None"):
        codec(SPEC).decode_sum([None, wire], N)  # type: ignore[list-item]


def test_memory_that_torch_cannot_share_is_refused(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(array: object, **_: object) -> None:
        raise BufferError("Unsupported device_type: 13")

    monkeypatch.setattr(cupy.ndarray, "__dlpack__", unsupported)
    with pytest.raises(ValueError, match=r"expected memory that torch can share, .*malloc_managed"):
        codec(SPEC).encode(cupy.ndarray(gradient()))  # type: ignore[arg-type]


def test_faults_are_an_array_too(cupy: FakeCupy) -> None:
    layout = Layout([Segment(codec(SPEC), N)])
    wire = cupy.ndarray(layout.encode(gradient()))
    faults: Any = cupy.ndarray(torch.tensor([-1]))
    layout.decode(wire, faults=faults)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"faults: expected a CuPy array .* got a tensor"):
        layout.decode(wire, faults=torch.tensor([-1]))  # type: ignore[arg-type]


def test_tensors_do_not_ask_for_cupy(cupy: FakeCupy) -> None:
    codec(SPEC).decode(codec(SPEC).encode(gradient()), N)
    assert cupy.log == []


def test_without_cupy_nothing_is_a_cupy_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert not cupy_arrays.is_array(gradient())
    assert not cupy_arrays.has_arrays([gradient()])
    with pytest.raises(TypeError, match="gradient: expected a tensor, got list"):
        codec(SPEC).encode([1.0])  # type: ignore[arg-type]
    assert "cupy" not in sys.modules


def test_cupy_has_what_is_asked_of_it() -> None:
    real = pytest.importorskip("cupy", reason="CuPy is not installed")
    for name in ("__dlpack__", "__dlpack_device__", "flags", "strides", "device"):
        assert hasattr(real.ndarray, name)
    assert callable(real.from_dlpack)
    assert callable(real.ascontiguousarray)
    assert callable(real.cuda.get_current_stream)
    assert hasattr(real.cuda.Stream, "ptr") or "ptr" in dir(real.cuda.Stream(null=True))
    assert hasattr(real.cuda.Device, "__enter__")
    assert not cupy_arrays.is_array(gradient())
