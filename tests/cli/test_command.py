"""The `zcomm` command: from an empty directory, at 80 and 200 columns, into a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zcomm
from zcomm.cli import COMMANDS, main, make_parser

# The script that pip installed; without an installed wheel, the module.
SCRIPT = Path(sys.executable).parent / "zcomm"
COMMAND = [str(SCRIPT)] if "ZCOMM_WHEEL" in os.environ else [sys.executable, "-P", "-m", "zcomm"]
PLAN = "plan --params 7e9 --world 64 --hosts 8 --net 10gbit --optimizer adamw --dtype bf16"
BENCH = "bench --min 64K --max 256K --codecs int8 --rounds 2"
CONTROL_CODE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def run_zcomm(
    folder: Path, arguments: str, columns: int = 80, code: int = 0, **env: str
) -> tuple[str, str]:
    """stdout and stderr of a run in an empty folder, which it must leave empty."""
    empty = folder / "empty"
    empty.mkdir()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        done = subprocess.run(
            [*COMMAND, *arguments.split()],
            cwd=empty,
            env={**os.environ, "COLUMNS": str(columns), **env},
            stdout=out,
            stderr=err,
        )
    texts = (folder / "out").read_text(), (folder / "err").read_text()
    assert done.returncode == code, texts
    assert list(empty.iterdir()) == []
    for text in texts:
        assert not CONTROL_CODE.search(text), text
        assert "Traceback" not in text
    return texts


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_version(tmp_path: Path) -> None:
    assert run_zcomm(tmp_path, "--version") == (f"zcomm {zcomm.__version__}\n", "")


def test_help_names_every_command(tmp_path: Path) -> None:
    text, _ = run_zcomm(tmp_path, "--help")
    for name, module in COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(module.HELP.split()[0])}", text, re.MULTILINE)


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_fits_the_terminal(
    command: list[str],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(" ".join(["usage: zcomm", *command]))
    assert not CONTROL_CODE.search(text)
    # A command in an example is not split across lines.
    prose = re.sub(r"^    (?:zcomm|torchrun) .*", "", text, flags=re.MULTILINE)
    assert widest(prose) <= columns


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr() == (make_parser().format_help(), "")


@pytest.mark.parametrize("arguments", ["cure", "doctor --cure", "--cure doctor"])
def test_bad_arguments_get_a_sentence(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: zcomm")
    assert "error: " in err


def test_an_unknown_command_lists_the_known_ones(tmp_path: Path) -> None:
    _, err = run_zcomm(tmp_path, "cure", code=2)
    for name in COMMANDS:
        assert name in err.splitlines()[-1]


def test_doctor_into_a_file(tmp_path: Path) -> None:
    # Without UTF-8, as on a minimal machine.
    text, err = run_zcomm(tmp_path, "doctor", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert text.endswith("\n\nready\n"), text
    assert text.isascii()
    assert widest(text) <= 80
    assert err == ""


@pytest.mark.parametrize("columns", [80, 200])
def test_plan_into_a_file(columns: int, tmp_path: Path) -> None:
    text, err = run_zcomm(tmp_path, f"{PLAN} --step-time 0.8", columns)
    assert "lm4" in text
    assert widest(text) <= columns
    assert err == ""


def test_bench_into_a_file(tmp_path: Path) -> None:
    text, _ = run_zcomm(tmp_path, BENCH)
    assert "int8" in text
    assert widest(text) <= 80


def test_python_m_zcomm_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "zcomm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: zcomm [-h]")
    assert "demo" in done.stdout
