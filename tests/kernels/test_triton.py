"""The Triton kernel set: what can be tested without a GPU, and the contract in the interpreter.

Interpreted kernels need a separate process: pytest runs again in one, with the contract tests and
those in interpreted_triton/.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import interpreted
from contract_data import SPECS
from triton_process import CONTRACT, run_pytest
from zcomm import Layout, Segment, codec
from zcomm.kernels import triton as package
from zcomm.kernels.triton import plan
from zcomm.wire.header import align16

TESTS = Path(__file__).parent
BLOCKS = [spec for spec in SPECS if codec(spec).block]
needs_triton = pytest.mark.skipif(not interpreted.FOUND, reason=interpreted.NO_TRITON)


@needs_triton
@pytest.mark.parametrize("part", [CONTRACT, TESTS / "interpreted_triton"], ids=["contract", "own"])
def test_interpreted_kernels(part: Path) -> None:
    run_pytest("interpreted", part)


def test_import_of_zcomm_does_not_import_triton() -> None:
    code = "import sys, zcomm, zcomm.kernels.triton; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_absent_kernels_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    package._missing.cache_clear()
    reason = package.missing()
    if interpreted.FOUND:
        assert reason.startswith("triton cannot use a GPU here: ") or not reason
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    package._missing.cache_clear()
    assert package.missing().startswith("triton cannot be imported")
    package._missing.cache_clear()


def test_the_oldest_triton_is_known_to_pip_and_to_the_proof() -> None:
    oldest = ".".join(map(str, package.LEAST_VERSION))
    assert any(r.startswith(f"triton>={oldest};") for r in metadata.requires("zcomm") or ())
    assert f"triton-{oldest}.0\n" in (TESTS.parents[1] / "Makefile").read_text()


@needs_triton
def test_an_old_triton_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_old in (("3.5.1", True), ("3.6.0", False), ("3.10.0+rocm7", False)):
        monkeypatch.setattr("triton.__version__", version)
        package._missing.cache_clear()
        old = f"triton {version} flushes subnormal quotients to zero"
        assert package.missing().startswith(old) is is_old
    package._missing.cache_clear()


def test_a_codec_without_kernels_is_refused() -> None:
    prototype = SimpleNamespace(codec=SimpleNamespace(id=77), numel=3)
    layout: Any = SimpleNamespace(segments=[prototype], frames=[None])
    with pytest.raises(ValueError, match="layout: a segment's codec is none that Triton kernels"):
        plan.TilePlan(layout, 1024)


@needs_triton
def test_no_value_of_an_argument_chooses_a_variant() -> None:
    """Launches use exactly what was compiled ahead of time."""
    from zcomm.kernels.triton import registry

    for variant in registry.variants():
        parameters = {p.name: p for p in variant.function.params}
        assert (
            list(parameters) == [*variant.arguments, *variant.constexprs] == list(variant.signature)
        )
        for name in variant.arguments:
            assert parameters[name].do_not_specialize
            assert parameters[name].annotation_type == variant.signature[name] == "i64"
        assert all(parameters[name].is_constexpr for name in variant.constexprs)
        for backend in ("cuda", "hip"):
            assert variant.options_for(backend)["enable_fp_fusion"] is False


@needs_triton
def test_every_codec_and_block_size_has_its_variants() -> None:
    from zcomm.kernels.triton import registry

    names = [variant.name for variant in registry.variants()]
    assert len(names) == len(set(names)) == 2 * (7 * 6 + 3) + 7 + 1 + 1
    for spec in SPECS:
        c = codec(spec)
        assert registry.variant_name("decode", c.id, c.block) in names
    assert set(registry.topk_encode()) < set(names)


@pytest.mark.parametrize("spec", [*SPECS, *(f"lm2:block={1 << i}" for i in range(5, 11))])
def test_sections_are_those_of_the_format(spec: str) -> None:
    c = codec(spec)
    for n in (1, 2, 3, 31, 33, 127, 128, 129, 1023, 1025, 65536, 65537, 200_000):
        layout = Layout([Segment(codec("none"), 5), Segment(c, n, 5)])
        made = plan.TilePlan(layout, 4096)
        at = int(made.table[plan.SIGN_WORDS]) + len(plan.SEGMENT)
        row = dict(zip(plan.SEGMENT, made.table[at : at + len(plan.SEGMENT)].tolist()))
        assert row["section_0"] == layout.body_starts[1]
        end = row["section_2"] + align16(row["used_2"])
        assert end == layout.body_starts[1] + c.body_nbytes(n)
        assert (row["n"], row["k"], row["offset"], row["tiles"]) == (n, c.k(n), 5, -(-n // 4096))


def test_every_tile_is_in_one_launch() -> None:
    """With segments of all codecs and an empty frame; each launch's tiles are contiguous."""
    segments = [Segment(codec(s), 9000 + i, 10_000 * i, i % 2) for i, s in enumerate(BLOCKS)]
    layout = Layout(segments, peers=3)
    made = plan.TilePlan(layout, 4096)
    rows = made.table[made.tiles_at :].view(-1, 2).tolist()
    assert sum(group.tiles for group in made.groups) == len(rows) == 3 * len(BLOCKS) + 1
    assert [plan.NO_SEGMENT, 2] in rows
    for group in made.groups:
        for segment, index in rows[group.first_tile : group.first_tile + group.tiles]:
            if segment == plan.NO_SEGMENT:
                assert group.codec == 1
            else:
                assert index < 3
                assert layout.segments[segment].codec.id == group.codec
                assert layout.segments[segment].codec.block == group.block  # type: ignore[attr-defined]
