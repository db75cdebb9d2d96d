"""The codecs lose no more than the design says."""

from __future__ import annotations

import pytest

from codec_quality import accumulated_error, codec_error
from gradients import draw

# The design's figures; None where it has none.
FIGURES = {
    #        gaussian  t3    laplace with outliers
    "int8": (4e-5, 2e-4, None),
    "int4": (0.014, 0.050, 0.047),
    "lm4": (0.009, 0.009, 0.009),
    "lm2": (0.11, None, None),
    "sign": (0.36, 0.59, None),
}
DISTRIBUTIONS = {"gaussian": 0.10, "student-t3": 0.25, "laplace+outliers": 0.25}
CASES = [
    pytest.param(codec, name, figure, tolerance, id=f"{codec}-{name}")
    for codec, figures in FIGURES.items()
    for (name, tolerance), figure in zip(DISTRIBUTIONS.items(), figures)
    if figure is not None
]


@pytest.mark.parametrize(("codec", "distribution", "figure", "tolerance"), CASES)
def test_error_is_the_designs_figure(
    codec: str, distribution: str, figure: float, tolerance: float
) -> None:
    assert codec_error(codec, draw(distribution)) == pytest.approx(figure, rel=tolerance)


@pytest.mark.parametrize("codec", ["int4", "lm4"])
def test_feedback_recovers_the_accumulated_sum(codec: str) -> None:
    with_feedback = accumulated_error(codec, feedback=True)
    assert with_feedback <= 1e-4
    assert with_feedback * 10 <= accumulated_error(codec, feedback=False)


def test_fewer_bits_lose_more() -> None:
    x = draw("gaussian")
    errors = [
        codec_error(codec, x)
        for codec in ("none", "fp16", "bf16", "int8", "fp8", "lm4", "lm3", "lm2", "sign")
    ]
    assert errors == sorted(errors)
    assert errors[0] == 0
