"""Whole kernels in PTX: memory, control flow, warps. Each takes two addresses and two words."""

from __future__ import annotations

import ptx_matrix_kernels as matrices

HEAD = """.version 8.8
.target sm_100
.address_size 64
.const .align 4 .b8 levels[8] = {0, 0, 128, 63, 0, 0, 0, 64};
.global .align 2 .b8 steps[8] = {1, 0, 2, 0, 3, 0, 255};
.global .align 4 .u32 counter = 5;
.extern .shared .align 16 .b8 dynamic[];
"""
KERNEL = """
.visible .entry {name}(
	.param .align 8 .b8 {name}_param_0[24]
)
.maxntid 256, 1, 1
.minnctapersm 2
{{
	.reg .pred %p<20>;
	.reg .b16 %rs<20>;
	.reg .f32 %f<20>;
	.reg .b32 %r<20>;
	.reg .b64 %rd<20>;
	.shared .align 4 .b8 pad[4];
	.shared .align 16 .b8 tile[256];
	.local .align 8 .b8 depot[16];
	.loc 1 2 3
	ld.param.u64 %rd1, [{name}_param_0];
	ld.param.u64 %rd2, [{name}_param_0+8];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mov.u32 %r3, %ntid.x;
	mad.lo.u32 %r4, %r2, %r3, %r1;
	mul.wide.u32 %rd3, %r4, 4;
	add.s64 %rd4, %rd1, %rd3;
	add.s64 %rd5, %rd2, %rd3;
	{code}
	ret;
}}
"""

# %r1 thread, %r2 CTA, %r4 thread of the grid, %rd4 its input, %rd5 its output.
KERNELS = {
    "signed_bytes": "ld.global.s8 %r5, [%rd1+1]; ld.global.u8 %rs5, [%rd1+1];"
    "cvt.u32.u16 %r6, %rs5; shl.b32 %r6, %r6, 16; and.b32 %r5, %r5, 0xFFFF;"
    "or.b32 %r5, %r5, %r6; st.global.u32 [%rd5], %r5;",
    "vectors": "ld.global.nc.L1::no_allocate.v4.u32 {%r5, %r6, _, %r8}, [%rd1];"
    "ld.global.v8.b32 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%rd1];"
    "ld.volatile.global.u32 %r7, [%rd1+8]; st.global.cs.v4.u32 [%rd2], {%r8, %r7, %r6, %r5};"
    "st.relaxed.gpu.global.u32 [%rd2+16], %r17; st.global.v2.u64 [%rd2+32], {%rd1, 7};",
    "shared_addresses": "mov.u32 %r5, tile; shl.b32 %r6, %r1, 2; add.s32 %r5, %r5, %r6;"
    "st.shared.u32 [%r5], %r1; bar.sync 0; mov.u64 %rd6, tile; cvta.shared.u64 %rd7, %rd6;"
    "xor.b32 %r7, %r6, 4; cvt.u64.u32 %rd8, %r7; add.s64 %rd9, %rd7, %rd8; ld.u32 %r8, [%rd9];"
    "cvta.to.shared.u64 %rd10, %rd9; ld.shared.u32 %r9, [%rd10]; shl.b32 %r9, %r9, 8;"
    "or.b32 %r8, %r8, %r9; st.global.u32 [%rd5], %r8;",
    "dynamic_shared": "mov.u32 %r5, dynamic; mad.lo.u32 %r6, %r1, 4, %r5;"
    "st.shared.u32 [%r6+16], %r1;"
    "bar.sync 0; mov.b64 %rd6, dynamic; cvta.shared.u64 %rd7, %rd6; xor.b32 %r7, %r1, 1;"
    "mad.wide.u32 %rd8, %r7, 4, %rd7; ld.u32 %r8, [%rd8+16]; st.global.u32 [%rd5], %r8;"
    "cvta.to.shared.u64 %rd9, %rd8; ld.shared.u32 %r9, [%rd9+16]; setp.eq.u32 %p1, %r8, %r9;"
    "@!%p1 trap;",
    "poisoned_shared": "ld.param.u32 %r6, [poisoned_shared_param_0+16]; setp.ne.u32 %p1, %r6, 0;"
    "@%p1 trap; ld.shared.u32 %r5, [tile+4]; bar.sync 0; st.shared.u32 [tile+4], 1;"
    "st.global.u32 [%rd5], %r5;",
    "local_depot": "mov.b64 %rd6, depot; cvta.local.u64 %rd7, %rd6; st.local.u32 [%rd6+4], %r1;"
    "ld.u32 %r5, [%rd7+4]; st.global.u32 [%rd5], %r5;",
    "tables": "mul.wide.u32 %rd6, %r1, 4; mov.u64 %rd7, levels; add.s64 %rd6, %rd7, %rd6;"
    "ld.const.f32 %f1, [%rd6]; mul.wide.u32 %rd8, %r1, 2; mov.u64 %rd9, steps;"
    "add.s64 %rd8, %rd9, %rd8; ld.global.nc.u16 %rs1, [%rd8]; cvt.rn.f32.u16 %f2, %rs1;"
    "add.rn.f32 %f3, %f1, %f2; st.global.f32 [%rd5], %f3;",
    "module_counter": "atom.global.add.u32 %r5, [counter], 2; st.global.u32 [%rd5], %r5;",
    "param_address": "mov.b64 %rd6, param_address_param_0; add.s64 %rd7, %rd6, 8;"
    "ld.param.u32 %r5, [%rd7+8]; cvta.param.u64 %rd8, %rd6; ld.u32 %r6, [%rd8+20];"
    "add.u32 %r5, %r5, %r6; st.global.u32 [%rd5], %r5;",
    "branches": "mov.u32 %r5, 0; mov.u32 %r6, 0;\n$L_loop:\n"
    "add.u32 %r5, %r5, %r6; add.u32 %r6, %r6, 1;"
    "setp.le.u32 %p1, %r6, %r1; @%p1 bra $L_loop;\n"
    "$L_table: .branchtargets $L_zero, $L_one, $L_two;\n"
    "rem.u32 %r7, %r1, 3; brx.idx %r7, $L_table;\n"
    "$L_zero: add.u32 %r5, %r5, 1000; bra.uni $L_end;\n"
    "$L_one: add.u32 %r5, %r5, 2000; bra $L_end;\n"
    "$L_two: add.u32 %r5, %r5, 3000;\n$L_end: st.global.u32 [%rd5], %r5;",
    "scopes": "mov.u32 %r5, 1;\n{ .reg .b32 %r5, double; mov.u32 %r5, 2; mov.u32 double, %r5;\n"
    "{ .reg .b32 double; mov.u32 double, 9; }\nadd.u32 %r6, double, %r5; }\n"
    "add.u32 %r5, %r5, %r6; st.global.u32 [%rd5], %r5;",
    "halves": "ld.global.u32 %r5, [%rd4]; mov.b32 {%rs1, %rs2}, %r5; mov.b32 %r6, {%rs2, %rs1};"
    "mov.b64 %rd6, {%r5, %r6}; mov.b64 {%rs3, _, _, %rs4}, %rd6; mov.b32 {_, %rs5}, %r6;"
    "add.u16 %rs6, %rs3, %rs4; add.u16 %rs6, %rs6, %rs5; mov.pred %p1, -1; mov.pred %p2, 0;"
    "and.pred %p3, %p1, !%p2; @!%p3 trap; cvt.u32.u16 %r7, %rs6; st.global.u32 [%rd5], %r7;",
    "half_to_float": "cvt.u16.u32 %rs1, %r4; cvt.f32.f16 %f1, %rs1; st.global.f32 [%rd5], %f1;",
    "bfloat_to_float": "cvt.u16.u32 %rs1, %r4; cvt.f32.bf16 %f1, %rs1; st.global.f32 [%rd5], %f1;",
    "float_to_halves": "ld.global.f32 %f1, [%rd4]; cvt.rn.f16.f32 %rs1, %f1;"
    "cvt.rn.bf16.f32 %rs2, %f1;"
    "mov.b32 %r5, {%rs1, %rs2}; st.global.u32 [%rd5], %r5;",
    "float_to_pairs": "ld.global.f32 %f1, [%rd4]; cvt.rn.f16x2.f32 %r5, %f1, 0f3F800000;"
    "cvt.rz.bf16x2.f32 %r6, 0f40000000, %f1; shr.u32 %r5, %r5, 16; shl.b32 %r6, %r6, 16;"
    "or.b32 %r5, %r5, %r6; st.global.u32 [%rd5], %r5;",
    **{
        f"shuffle_{mode}": "ld.global.v2.u32 {%r5, %r6}, [%rd1]; xor.b32 %r7, %r1, 0xABC0;"
        f"shfl.sync.{mode}.b32 %r8|%p1, %r7, %r5, %r6, -1; selp.u32 %r9, 0x10000, 0, %p1;"
        "or.b32 %r8, %r8, %r9; st.global.u32 [%rd5], %r8;"
        for mode in ("up", "down", "bfly", "idx")
    },
    "votes": "ld.global.u32 %r5, [%rd4]; setp.ne.u32 %p1, %r5, 0; mov.u32 %r6, -1;"
    "vote.sync.ballot.b32 %r7, %p1, %r6; vote.sync.any.pred %p2, %p1, %r6;"
    "vote.sync.all.pred %p3, !%p1, %r6; vote.sync.uni.pred %p4, %p1, %r6; bar.warp.sync %r6;"
    "selp.u32 %r8, 1, 0, %p2; selp.u32 %r9, 2, 0, %p3; selp.u32 %r10, 4, 0, %p4;"
    "or.b32 %r8, %r8, %r9; or.b32 %r8, %r8, %r10; setp.eq.u32 %p5, %r1, 0;"
    "@%p5 st.global.u32 [%rd5], %r7; @!%p5 st.global.u32 [%rd5], %r8;",
    **{
        f"redux_{name}": f"ld.global.u32 %r5, [%rd4]; redux.sync.{op} %r6, %r5, -1;"
        "st.global.u32 [%rd5], %r6;"
        for name, op in {
            "add": "add.u32",
            "min": "min.s32",
            "max": "max.u32",
            "or": "or.b32",
            "and": "and.b32",
            "xor": "xor.b32",
            "fmax": "max.f32",
            "fmin_nan": "min.NaN.f32",
            "fmax_abs": "max.abs.f32",
        }.items()
    },
    **{
        f"atomic_{name}": "cvt.u64.u32 %rd8, %r4; add.u64 %rd8, %rd8, 3;"
        f"cvt.u{n}.u64 %{r}8, %rd8; {op}"
        for name, n, r, op in (
            ("add_u64", 64, "rd", "atom.global.add.u64 %rd9, [%rd2], %rd8;"),
            ("min_u64", 64, "rd", "atom.global.min.u64 %rd9, [%rd2], %rd8;"),
            ("max_s32", 32, "r", "atom.max.s32 %r9, [%rd2], %r8;"),
            (
                "exch_b64",
                64,
                "rd",
                "atom.exch.b64 %rd9, [%rd2], %rd8; st.global.u64 [%rd2+8], %rd9;",
            ),
            ("cas_b32", 32, "r", "atom.relaxed.gpu.global.cas.b32 %r9, [%rd2], 77, %r8;"),
            ("or_b32", 32, "r", "red.global.or.b32 [%rd2], %r8;"),
            ("and_b32", 32, "r", "atom.global.and.b32 _, [%rd2], %r8;"),
            ("inc_u32", 32, "r", "atom.global.inc.u32 %r9, [%rd2], %r8;"),
            ("add_triton", 64, "rd", "atom.global.gpu.acq_rel.add.u64 %rd9, [ %rd2 + 0 ], %rd8;"),
        )
    },
    "shared_atomic": "st.shared.u32 [tile], 0; bar.sync 0; atom.shared.add.u32 %r5, [tile], %r1;"
    "bar.sync 0; ld.shared.u32 %r6, [tile]; st.global.u32 [%rd5], %r6;",
    "misaligned": "ld.global.v2.u32 {%r5, %r6}, [%rd1+4]; st.global.u32 [%rd5], %r5;",
    "misaligned_shared": "ld.shared.u32 %r5, [tile+2]; st.global.u32 [%rd5], %r5;",
    "past_shared": "mov.u32 %r5, tile; ld.shared.u32 %r6, [%r5+256]; st.global.u32 [%rd5], %r6;",
    "past_param": "mov.b64 %rd6, past_param_param_0; ld.param.u32 %r5, [%rd6+24];"
    "st.global.u32 [%rd5], %r5;",
    "null": "mov.u64 %rd6, 0; ld.global.u32 %r5, [%rd6+16]; st.global.u32 [%rd5], %r5;",
    "trapped": "trap;",
    "one_copy": "ld.global.u32 %r5, [%rd4]; st.global.u32 [%rd5], %r5;",
    "lane_registers": "mov.u32 %r5, %laneid; mov.u32 %r6, %lanemask_lt; popc.b32 %r7, %r6;"
    "sub.u32 %r8, %r5, %r7; mov.u32 %r9, %nctaid.x; shl.b32 %r9, %r9, 8; or.b32 %r8, %r8, %r9;"
    "st.global.u32 [%rd5], %r8;",
}


# Parameters as Triton declares them, of several sizes; and what it leaves for debuggers.
SEPARATE_PARAMS = """
.visible .entry separate_params(
	.param .u64 .ptr .global .align 1 separate_params_0,
	.param .u16 separate_params_1,
	.param .u32 separate_params_2,
	.param .u8 separate_params_3,
	.param .u64 separate_params_4
)
.reqntid 1
{
	.reg .b16 %rs<4>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<4>;
	ld.param.b64 %rd1, [separate_params_0];
	ld.param.b16 %rs1, [separate_params_1];
	ld.param.b32 %r1, [separate_params_2];
	ld.param.b8 %rs2, [separate_params_3];
	ld.param.b64 %rd2, [separate_params_4];
	cvt.u32.u16 %r2, %rs1;
	cvt.u32.u16 %r3, %rs2;
	st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };
	st.global.v2.b64 [ %rd1 + 16 ], { %rd2, %rd1 };
	st.global.b32 [%rd1+8], %r3;
	ret;
$L__func_end0:
}
	.file	1 "kernels.py"
	.section	.debug_abbrev
	{
.b8 1                                   // a { brace } in a comment
.b8 17
	}
	.section	.debug_macinfo	{	}
"""


def module() -> str:
    texts = [KERNEL.format(name=n, code=code) for n, code in (KERNELS | matrices.KERNELS).items()]
    return HEAD + "".join(texts) + SEPARATE_PARAMS


def with_statement(text: str) -> str:
    """A module whose one kernel has this statement."""
    return HEAD + KERNEL.format(name="refused", code=text)
