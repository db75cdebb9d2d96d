"""Codecs by hand: what each one costs, what it loses, and what feedback gives back.

Run: python examples/codecs.py
"""

import torch
from torch import Tensor

import zcomm

NUMEL = 2**18
CODECS = "bf16", "int8", "fp8", "int4", "lm4", "lm3", "lm2", "sign", "topk:0.01"


def make_gradient(seed: int, outliers: bool = False) -> Tensor:
    """Gaussian noise; with outliers, every thousandth element is thirty times as large."""
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    if outliers:
        gradient[::1000] *= 30
    return gradient


def lost(exact: Tensor, got: Tensor) -> float:
    """The norm of the error, relative to the norm of the exact values."""
    return ((got - exact).norm() / exact.norm()).item()


def compare_codecs() -> None:
    gaussian, spiky = make_gradient(0), make_gradient(0, outliers=True)
    print("codec      fewer bytes   error, Gaussian   with outliers")
    for spec in CODECS:
        codec = zcomm.codec(spec)
        wire = codec.encode(gaussian)  # a uint8 tensor: the bytes to send
        errors = [lost(x, codec.decode(codec.encode(x), NUMEL)) for x in (gaussian, spiky)]
        ratio = gaussian.nbytes / wire.nbytes
        print(f"{spec:9} {ratio:11.1f}x {errors[0]:17.2%} {errors[1]:15.2%}")


def sum_over_ranks() -> None:
    """The owner of a shard decodes and adds the wires of all ranks in one pass."""
    codec, gradients = zcomm.codec("lm4"), [make_gradient(rank) for rank in range(4)]
    wires = [codec.encode(gradient, prescale=1 / 4) for gradient in gradients]
    mean = codec.decode_sum(wires, NUMEL)
    print(f"mean of 4 ranks with lm4: error {lost(torch.stack(gradients).mean(0), mean):.2%}")


def error_of_sum(spec: str, feedback: bool) -> float:
    """The error in the sum of 100 noisy copies of one gradient."""
    codec, signal = zcomm.codec(spec), make_gradient(0)
    # encode adds the residual to the gradient and leaves in it what this wire loses.
    residual = codec.new_residual(NUMEL) if feedback else None
    exact, arrived = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(100):
        gradient = signal + make_gradient(1 + step)
        exact += gradient
        arrived += codec.decode(codec.encode(gradient, residual), NUMEL)
    return lost(exact, arrived)


def refuse_damage() -> None:
    """Every wire has a checksum."""
    codec = zcomm.codec("int8")
    wire = codec.encode(make_gradient(0))
    wire[1000] ^= 1
    try:
        codec.decode(wire, NUMEL)
    except zcomm.WireError as error:
        print(f"one flipped bit is refused: {error}")


if __name__ == "__main__":
    compare_codecs()
    sum_over_ranks()
    for spec in ("lm4", "sign"):
        without, with_feedback = error_of_sum(spec, False), error_of_sum(spec, True)
        print(f"100 steps of {spec}: error {without:.2%}, with feedback {with_feedback:.2%}")
    refuse_damage()
