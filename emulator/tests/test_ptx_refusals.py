"""The translator of PTX refuses what it does not know, and what is not the same on every GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ptx_kernels
import ptx_runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.u32 %r5, %r1;", "unknown instruction frobnicate.u32"),
        ("add.u32.sometimes %r5, %r1, %r2;", "unknown instruction"),
        ("add.wrap.u32 %r5, %r1, %r2;", "unknown instruction"),
        ("add.sat.u16x2 %r5, %r1, %r2;", "unknown instruction"),
        ("max.s16x2.relu %r5, %r1, %r2;", "unknown instruction"),
        ("cvt.rmi.ftz.f32.f32 %f1, %f2;", r"\.ftz is not IEEE arithmetic"),
        ("popc.u32 %r5, %r1;", "unknown instruction"),
        ("ld.global.sometimes.u32 %r5, [%rd1];", "unknown instruction"),
        ("ld.global.L2::cache_hint.u32 %r5, [%rd1], %rd2;", "unknown instruction"),
        ("add.u32 %r5, %r1;", "wrong number of operands: expected 3, got 2"),
        ("ld.global.u32 %r5;", "wrong number of operands: expected 2, got 1"),
        ("max.f32 %f1, %f2;", "wrong number of operands: expected 3 or 4, got 2"),
        ("bar.sync 0, 64;", "wrong number of operands"),
        ("bar.sync 1;", "expected barrier 0, got 1"),
        ("div.approx.f32 %f1, %f2, %f3;", r"\.approx is not IEEE arithmetic"),
        ("div.full.f32 %f1, %f2, %f3;", r"\.full is not IEEE arithmetic"),
        ("add.rn.ftz.f32 %f1, %f2, %f3;", r"\.ftz is not IEEE arithmetic"),
        ("setp.lt.ftz.f32 %p1, %f2, %f3;", r"\.ftz is not IEEE arithmetic"),
        ("ex2.approx.f32 %f1, %f2;", r"\.approx is not IEEE arithmetic"),
        ("add.f32 %f1, %f2, %f3;", "add of floats without .rn"),
        ("sub.f64 %rd6, %rd7, %rd8;", "sub of floats without .rn"),
        ("mul.f32 %f1, %f2, %f3;", "compile with --fmad=false"),
        ("fma.rz.f32 %f1, %f2, %f3, %f4;", "fma of floats without .rn"),
        ("mad.f32 %f1, %f2, %f3, %f4;", "mad of floats without .rn"),
        ("add.rn.sat.f32 %f1, %f2, %f3;", "unknown instruction"),
        ("sqrt.rz.f32 %f1, %f2;", "unknown instruction"),
        ("setp.ltu.s32 %p1, %r1, %r2;", "unknown instruction"),
        ("setp.lo.s32 %p1, %r1, %r2;", "unknown instruction"),
        ("cvt.f32.s32 %f1, %r1;", "unknown instruction"),
        ("cvt.rn.s32.f32 %r5, %f1;", "unknown instruction"),
        ("add.u32 %r5, %rd1, %r2;", "expected a register of .u32, got %rd1"),
        ("add.u64 %rd6, %r1, %rd2;", "expected a register of .u64, got %r1"),
        ("add.u32 %r5, %r99, 1;", "expected a register, got %r99"),
        ("add.rn.f32 %f1, %f2, 1;", "expected a register, got 1"),
        ("selp.u32 %r5, 1, 2, %r3;", "expected a register of .pred, got %r3"),
        ("mov.u32 %r5, nothing;", "nothing is not declared"),
        ("mov.u32 %r5, counter;", "expected an address of 64 bits"),
        ("mov.u32 %r5, %clock;", "expected a register, got %clock"),
        ("ld.global.u32 %r5, [%r1];", "expected an address of 64 bits, got %r1"),
        ("ld.global.u32 %r5, [tile];", "tile lies in .shared, not in .global"),
        ("ld.global.v2.u32 {%r5, %r6, %r7}, [%rd1];", "expected 2 elements, got 3"),
        (
            "ld.global.v8.u64 {%rd6, %rd6, %rd6, %rd6, %rd6, %rd6, %rd6, %rd6}, [%rd1];",
            "at most 32 bytes",
        ),
        ("st.param.u32 [refused_param_0], %r1;", "cannot be written"),
        ("atom.global.add.f32 %f1, [%rd1], %f2;", "unknown type or space of atom.add"),
        ("red.global.exch.b32 [%rd1], %r1;", "red returns nothing"),
        ("call helper;", "unknown instruction call"),
        ("bra $L_nowhere;", r"there is no label \$L_nowhere"),
        ("$L_twice: $L_twice: mov.u32 %r5, 1;", "the label is there twice"),
        ("brx.idx %r1, $L_table;", "there are no .branchtargets"),
        (".align 4 .b8 x;", "unknown directive"),
        ("cp.async.wait_all;", "unknown instruction"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5}, [%r6];", "expected 2 elements, got 1"),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r5}, [%r6];", "unknown instruction"),
        ("ldmatrix.sync.aligned.m8n8.x1.b16 {%r5}, [%rd6];", "unknown instruction"),
        ("atom.global.acq_rel.gpu.add.u32 %r5, [%rd1], %r6;", "unknown instruction"),
    ],
)
def test_the_translator_refuses(tmp_path: Path, text: str, message: str) -> None:
    ptx = tmp_path / "refused.ptx"
    ptx.write_text(ptx_kernels.with_statement(text))
    with pytest.raises(ptx_runs.PtxError, match=rf"line \d+: .*{message}"):
        ptx_runs.translate(ptx)
    assert not ptx.with_suffix(".cpp").exists()


def test_the_command_says_what_it_refuses(tmp_path: Path) -> None:
    ptx = tmp_path / "refused.ptx"
    command = [sys.executable, str(ptx_runs.TRANSLATOR), str(ptx), "-o", str(tmp_path / "out.cpp")]
    ptx.write_text(ptx_kernels.with_statement("mov.u32 %r5, 1;"))
    subprocess.run(command, check=True)
    translated = (tmp_path / "out.cpp").read_text()
    assert translated == ptx_runs.translate(ptx).read_text()
    ptx.write_text(ptx_kernels.with_statement("frobnicate %r5;"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{ptx}: line 33: unknown instruction frobnicate: frobnicate %r5" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".address_size 64", ".address_size 32", "expected .address_size 64"),
        (".visible .entry", ".visible .func", "unknown directive"),
        (".maxntid 256, 1, 1", ".blocksareclusters", "unknown .entry"),
        ("_param_0[24]", "_param_0[24],\n.shared .u64 second", "expected a parameter"),
        (".reg .pred %p<20>", ".reg .b128 %p<20>", "unknown .reg"),
        ("ret;", "ret", "expected a semicolon"),
        (".u32 counter = 5", ".u64 counter = levels", "expected a number as initial value"),
    ],
)
def test_the_translator_refuses_a_module(tmp_path: Path, old: str, new: str, message: str) -> None:
    ptx = tmp_path / "refused.ptx"
    text = ptx_kernels.with_statement("")
    assert old in text
    ptx.write_text(text.replace(old, new))
    with pytest.raises(ptx_runs.PtxError, match=message):
        ptx_runs.translate(ptx)
