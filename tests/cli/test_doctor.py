"""`zcomm doctor`: what it finds on this machine, and what it says when something is wrong."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zcomm
from zcomm.cli.doctor import command as doctor
from zcomm.cli.doctor import self_test
from zcomm.conformance import gpu_tools, vectors
from zcomm.launch import interfaces
from zcomm.report.finding import NOTE, OK, PROBLEM, Finding, guarded, say, show

NAMES = [
    "zcomm",
    "torch",
    "internals",
    "backends",
    "processor",
    "kernels",
    "cuda",
    "network",
    "vectors",
    "two ranks",
    "shared memory",
]


def run_doctor(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "zcomm", "doctor", *options]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True
    )


def test_this_machine_is_ready_and_json_is_one_object(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert report["ready"] is True
    assert report["what_to_do"] == []
    checks = report["checks"]
    assert list(checks) == NAMES
    assert checks["backends"]["gloo"] is True
    assert checks["processor"]["in_use"].startswith("cpu:")
    assert checks["kernels"]["absent"] == {k: v for k, v in zcomm.available_kernels().items() if v}
    assert checks["vectors"]["kernels"]["cpu:scalar"] == []
    assert "lo" in [i["name"] for i in checks["network"]["interfaces"]]
    first, second = checks["two ranks"]["ranks"]
    assert first["replica"] == second["replica"]
    assert checks["shared memory"]["state"] == OK
    assert checks["shared memory"]["bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_becomes_a_numbered_list(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, COLUMNS="80", ZCOMM_CPU_ISA="avx9", GLOO_SOCKET_IFNAME="nowhere0")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "Traceback" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    states = {line[9:24].strip(): line[:9].strip() for line in done.stdout.splitlines()}
    problems = [name for name in NAMES if states[name] == PROBLEM]
    assert problems == ["processor", "network", "two ranks"]
    text, _, to_do = done.stdout.partition("\nnot ready. What to fix:\n")
    assert states["shared memory"] == NOTE
    assert "expected one of scalar, avx2, avx512, got 'avx9'" in " ".join(text.split())
    assert [line[:4] for line in to_do.splitlines() if line[:3].strip()] == [
        " 1. ",
        " 2. ",
        " 3. ",
    ]
    assert "Unset ZCOMM_CPU_ISA=avx9" in to_do
    assert "Set GLOO_SOCKET_IFNAME" in to_do


def with_checks(monkeypatch: pytest.MonkeyPatch, as_json: bool = False, **checks: Any) -> int:
    monkeypatch.setattr(doctor, "CHECKS", checks)
    return doctor.run(argparse.Namespace(json=as_json))


def good() -> Finding:
    return Finding(OK, ["as it should be"])


def broken() -> Finding:
    raise ZeroDivisionError("division by zero\nin two lines")


def test_a_check_that_raises_is_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_checks(monkeypatch, first=good, second=broken, third=good) == 1
    out = capsys.readouterr().out
    assert out.count("as it should be") == 2
    assert "problem  second         the check failed: ZeroDivisionError: division by zero" in out
    assert "Traceback" not in out


def test_notes_do_not_keep_it_from_being_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_checks(monkeypatch, cuda=gpu_tools.check, other=good) == 0
    out = capsys.readouterr().out
    assert out.startswith("note     cuda           nvcc ")
    assert out.endswith("\nready\n")


def test_json_of_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_checks(monkeypatch, as_json=True, first=good, second=broken) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is False
    assert len(report["what_to_do"]) == 1
    assert report["checks"]["second"]["error"] == "division by zero\nin two lines"


def test_wrong_bytes_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = copy.deepcopy(vectors.load())
    changed["vectors"][0]["wire"] = changed["vectors"][0]["wire"][::-1]
    monkeypatch.setattr(vectors, "load", lambda: changed)
    found = self_test.check_vectors()
    assert found.state == PROBLEM
    assert "reference: expected the checked-in bytes, got others for none of 5" in found.lines[0]
    assert "Do not train" in found.remedy


def test_a_kernel_set_that_is_absent_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = dict.fromkeys(zcomm.available_kernels(), "zcomm._core cannot be imported: no file")
    monkeypatch.setattr(zcomm, "available_kernels", lambda: {**lost, "reference": ""})
    found = doctor.check_kernels()
    assert found.state == PROBLEM
    assert found.lines[:2] == [
        "reference   available",
        "cpu         unavailable: zcomm._core cannot be imported: no file",
    ]
    assert "pip install" in found.remedy


def test_an_old_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.5.1+cpu")
    found = doctor.check_torch()
    assert found.state == PROBLEM
    assert "expected 2.6 or later" in found.lines[0]


def ranks_found(**changes: Any) -> list[dict[str, Any]]:
    fine = {"replica": "a", "finite": True, "errors": {"none": 0.0, "int8": 0.01, "lm4": 0.1}}
    return [fine, {**fine, **changes}]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"replica": "b"}, "expected identical replicas"),
        ({"finite": False}, "expected finite parameters"),
        (
            {"errors": {"none": 0.0, "int8": 0.5, "lm4": 0.1}},
            "all_reduce with int8: expected an error of at most 0.03, got 0.5",
        ),
        (
            {"errors": {"none": 0.0, "int8": 0.01, "lm4": self_test._finite(float("nan"))}},
            "all_reduce with lm4: expected an error of at most 0.2, got 1e+09",
        ),
    ],
)
def test_wrong_results_of_ranks_are_a_problem(changes: dict[str, Any], text: str) -> None:
    assert self_test.judged(ranks_found(), "lo", {}).state == OK
    found = self_test.judged(ranks_found(**changes), "lo", {})
    assert found.state == PROBLEM
    assert text in found.lines[0]


def test_ranks_that_cannot_connect_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nowhere = interfaces.Choice("nowhere0", "a test says so")
    monkeypatch.setattr(self_test, "gloo_choice", lambda _: nowhere)
    found = self_test.check_ranks()
    assert found.state == PROBLEM
    assert found.lines[0].startswith("2 ranks over nowhere0 failed: RuntimeError")
    assert found.lines[-1] == "Over lo they work."
    assert "GLOO_SOCKET_IFNAME" in found.remedy
    assert "nowhere0" in found.details["error"]
    assert capfd.readouterr() == ("", "")


def test_ranks_that_may_not_share_memory_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_SHM", "0")
    self_test._run.cache_clear()
    found = self_test.check_shared_memory()
    self_test._run.cache_clear()
    assert found.state == NOTE
    assert found.lines[0].startswith("ranks of one host use gloo: rank 0: ZCOMM_SHM=0 turns")
    assert found.details["bytes"] == 0


def test_a_kernel_without_pidfds_is_a_note() -> None:
    seen = {"reason": "", "bytes": 1, "has_pidfds": True}
    assert self_test.judged_memory([seen, seen]).state == OK
    found = self_test.judged_memory([seen, {**seen, "has_pidfds": False}])
    assert found.state == NOTE
    assert found.lines[0] == "the ranks of this host share memory"
    assert "when its connection closes" in found.lines[1]


def test_interfaces_are_those_of_the_machine() -> None:
    found = {i.name: i for i in interfaces.list_interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert found["lo"].addresses[0] == "127.0.0.1"
    assert found["lo"].is_up


ETH = interfaces.Interface("eth7", ("198.51.100.7",), True, 25_000)
LO = interfaces.Interface("lo", ("127.0.0.1",), True, None)
DOWN = interfaces.Interface("eth8", (), False, None)


@pytest.mark.parametrize(
    ("told", "chosen", "problem"),
    [("eth7", "eth7", False), ("eth7,lo", "eth7", False), ("eth8", None, True), ("x", None, True)],
)
def test_gloo_uses_the_interface_that_it_is_told(
    told: str, chosen: str | None, problem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(interfaces.IFNAME_VARIABLE, told)
    choice = interfaces.gloo_choice([LO, ETH, DOWN])
    assert (choice.interface, choice.problem) == (chosen, problem)


@pytest.mark.parametrize(
    ("address", "chosen"),
    [("127.0.1.1", "lo"), ("198.51.100.7", "eth7"), ("198.51.100.8", None), (None, "lo")],
)
def test_gloo_uses_the_interface_of_the_hosts_name(
    address: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(interfaces.IFNAME_VARIABLE, raising=False)
    monkeypatch.setattr(interfaces, "_usable_address", lambda host: address)
    assert interfaces.gloo_choice([LO, ETH, DOWN]).interface == chosen


def test_a_name_without_an_address_is_not_usable() -> None:
    assert interfaces._usable_address("localhost") in ("127.0.0.1", "::1")
    assert interfaces._usable_address("198.51.100.7") is None  # of another machine
    assert interfaces._usable_address("no such host") is None


def test_loopback_beside_a_real_interface_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "list_interfaces", lambda: [LO, ETH, DOWN])
    monkeypatch.setenv(interfaces.IFNAME_VARIABLE, "lo")
    found = interfaces.check()
    assert found.state == "note"
    assert found.lines[:3] == [
        "lo    127.0.0.1     this machine only (gloo)",
        "eth7  198.51.100.7  25 Gbit/s",
        "down or without an address: eth8",
    ]
    assert "set GLOO_SOCKET_IFNAME=eth7 on each" in found.lines[-1]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_lines_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = guarded(lambda: Finding(OK, ["words and " * 40, "/a/long/path" * 20]))
    lines = show("name", found).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("ok       name           words and words")


def test_what_the_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("Zen™ µ")
    assert raw.getvalue() == b"Zen\\u2122 \\xb5\n"
