"""Every function that takes settings takes them as keywords, and all signatures agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_args

import pytest

import zcomm
from zcomm.torch_private import fsdp

FIELDS = {field.name: field for field in fields(zcomm.Settings) if field.init}
TAKING_SETTINGS: list[Callable[..., Any]] = [
    zcomm.compress,
    zcomm.HookState,
    zcomm.ZeroOptimizer,
    *([] if fsdp.missing() else [zcomm.fsdp.compress]),
]
# The other parameters of each.
OTHERS = {
    "compress": {"ddp", "scaler"},
    "HookState": {"scaler"},
    "ZeroOptimizer": {
        *("ddp", "optimizer_class", "params", "param_codec", "lr", "scaler"),
        "optimizer_options",
    },
    "fsdp": {"model", "param_codec"},
}
# FSDP2's residuals are small by default: int8, or bf16 if they decay. ZeRO alone saves memory only.
OTHER_DEFAULTS = {"fsdp": {"residual_dtype": None}, "ZeroOptimizer": {"codec": "none"}}


def name_of(function: Callable[..., Any]) -> str:
    return "fsdp" if "fsdp" in function.__module__ else function.__name__


@pytest.mark.parametrize("function", TAKING_SETTINGS, ids=name_of)
def test_signatures_and_settings_agree(function: Callable[..., Any]) -> None:
    name, takes = name_of(function), inspect.signature(function).parameters
    assert set(takes) - set(FIELDS) == OTHERS[name]
    assert [p for p in takes if p in FIELDS] == list(FIELDS)
    for setting, field in FIELDS.items():
        assert field.default is not MISSING
        expected = OTHER_DEFAULTS.get(name, {}).get(setting, field.default)
        assert takes[setting].default == expected, setting
        by_position = setting == "codec"
        assert (takes[setting].kind is not inspect.Parameter.KEYWORD_ONLY) == by_position


def first_type(annotation: Any) -> Any:
    """The first member of a union, or the type itself."""
    return next(iter(get_args(annotation)), annotation)


@pytest.mark.parametrize("function", TAKING_SETTINGS, ids=name_of)
def test_every_setting_has_a_type_and_a_line_of_help(function: Callable[..., Any]) -> None:
    lines = (inspect.getdoc(function) or "").splitlines()
    takes = inspect.signature(function).parameters
    for setting in FIELDS:
        annotation = takes[setting].annotation
        assert annotation not in (Any, inspect.Parameter.empty), setting
        if name_of(function) != "fsdp" or setting not in ("codec", "residual_dtype"):
            assert first_type(annotation) == first_type(FIELDS[setting].type), setting
        assert any(line.startswith(f"{setting} ") for line in lines), setting
