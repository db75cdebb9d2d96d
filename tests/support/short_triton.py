"""A pytest plugin: of the contract, what `make test` asks of the Triton kernels.

All codecs with fp32 gradients, three of them with all dtypes and storages; of the damaged wires,
some of each kind. It takes a minute. `make gpu-proof` has no such limits.
"""

from __future__ import annotations

import os

import pytest

from contract_data import SPECS

# Calls of compiled kernels are quick, but every block size is another kernel to compile: there, all
# dtypes of three codecs, all storages, and blocks of 128 elements.
IS_COMPILED = "ptx" in os.environ.get("ZCOMM_TRITON", "")

THREE = ("int4", "lm4", "none")
FP32, BF16, FP16, INT8 = "torch.float32", "torch.bfloat16", "torch.float16", "torch.int8"
SAME_BYTES = {
    *((spec, FP32, FP32) for spec in SPECS),
    *((spec, FP32, INT8) for spec in (*THREE, "sign", "topk:0.3")),
    *((spec, FP32, "None") for spec in THREE),
    *((spec, dtype, BF16) for spec in THREE for dtype in (BF16, FP16)),
}
# By test: which parameters are taken; those that are not named take all.
TAKEN: dict[str, dict[str, list[str]]] = {
    "test_half_way_goes_to_even": {},
    "test_vector": {},
    "test_sums_are_taken_in_the_order_of_the_wires": {},
    "test_outputs_are_written_whole_and_in_place": {
        "storage": [FP32],
        "spec": ["int8:block=256", "topk:0.01"],
    },
    "test_nan_is_loud_and_keeps_its_residual": {
        "storage": [INT8],
        "spec": ["lm3", "bf16", "topk:0.01"],
    },
    "test_residual_that_is_a_nan_keeps_its_bytes": {},
    "test_idle_segment_sends_zeros_and_keeps_its_residual": {
        "storage": [INT8],
        "grad_dtype": [BF16],
    },
    "test_one_element_that_is_not_zero_is_enough": {},
    "test_segment_without_a_residual_among_others": {"spec": ["int8", "none", "topk:0.1"]},
    "test_selection_is_that_of_a_stable_sort": {
        "ratio": ["0.01"],
        "kind": ["heavy ties"],
    },
    "test_negative_zero_that_one_wire_sends_and_another_does_not": {},
    "test_wrong_header_field_under_a_right_checksum": {
        "spec": ["mixed"],
        "field": ["magic", "flags", "layout"],
    },
    "test_wire_of_another_layout_with_the_same_length": {},
    "test_refused_wire_is_named_among_several": {"spec": ["int4"]},
    "test_scale_that_does_not_occur": {"spec": ["int4"]},
    "test_code_in_a_zero_or_nan_block": {"spec": ["sign"], "scale": ["0"]},
    "test_code_that_does_not_occur": {"spec": ["int8", "int4", "fp8"]},
    "test_padding_and_unused_bits": {"n": ["5"], "spec": ["none", "int4", "lm3", "topk:0.3"]},
    "test_topk_entries_that_make_no_sense": {"case": ["one too many", "equal offsets"]},
    "test_segment_cut_at_block_boundaries_gives_the_same_blocks": {
        "spec": ["lm4", "lm3:block=1024"]
    },
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    taken = [item for item in items if _is_taken(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = taken


def _is_taken(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    if "interpreted_triton" in str(item.path):
        return True
    callspec = getattr(item, "callspec", None)
    given = {name: str(value) for name, value in callspec.params.items()} if callspec else {}
    if IS_COMPILED and ":block=" in " ".join((item.name, *given.values())):
        return False
    if item.originalname == "test_same_bytes_as_the_reference":
        if IS_COMPILED:
            return given["dtype"] == FP32 or given["spec"] in THREE
        return (given["spec"], given["dtype"], given["storage"]) in SAME_BYTES
    wanted = TAKEN.get(item.originalname)
    return wanted is not None and all(given[name] in some for name, some in wanted.items())
