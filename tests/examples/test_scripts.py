"""The examples run as their docstrings say, and what they print is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pages import ROOT
from scripts import python, torchrun

EXAMPLES = sorted(ROOT.glob("examples/*.py"))
UNTRAINED = 2.3  # log 10: the loss of a guess among ten classes


def printed(name: str, folder: Path) -> str:
    """What the example prints, started with the command of its docstring."""
    script = ROOT / "examples" / name
    command = ast.get_docstring(ast.parse(script.read_text())) or ""
    found = re.search(rf"^Run: torchrun --nproc-per-node (\d) examples/{name}$", command, re.M)
    if found:
        return torchrun(script, folder, ranks=int(found[1]))
    assert re.search(rf"^Run: python examples/{name}$", command, re.M), command
    return python(script, folder)


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_they_are_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 80


def test_ddp(tmp_path: Path) -> None:
    text = printed("ddp.py", tmp_path)
    [before], [plain, compressed] = numbers(r"training: (.*)", text), numbers(r"loss (\S+),", text)
    assert before == pytest.approx(UNTRAINED, abs=0.1)
    assert plain < before / 10
    assert compressed == pytest.approx(plain, abs=0.02)
    raw, sent = numbers(r"(\S+) MB sent", text)
    assert numbers(r"(\S+) times fewer", text) == [pytest.approx(raw / sent, abs=0.1)]
    assert raw > 7 * sent
    assert "replicas identical: True" in text


def test_zero(tmp_path: Path) -> None:
    text = printed("zero.py", tmp_path)
    plain, sharded = numbers(r"loss (\S+),", text)
    assert plain < UNTRAINED / 10
    assert sharded == pytest.approx(plain, abs=0.02)
    whole, half = numbers(r"(\S+) MB of state", text)
    assert half == pytest.approx(whole / 2, abs=0.01)
    [masters] = numbers(r"(\S+) MB of exact", text)
    assert masters == pytest.approx(whole / 4, abs=0.01)  # AdamW keeps two numbers per parameter
    [ratio] = numbers(r"(\S+) times fewer", text)
    assert ratio > 7


def test_fsdp(tmp_path: Path) -> None:
    text = printed("fsdp.py", tmp_path)
    exact, compressed = numbers(r"loss (\S+),", text)
    assert exact < UNTRAINED / 10
    assert compressed == pytest.approx(exact, abs=0.02)
    raw, sent = numbers(r"(\S+) MB sent", text)
    assert raw > 4 * sent
    assert "agree to the bit: True" in text
    [held], [whole] = numbers(r"holds (\S+) of", text), numbers(r"of (\S+) MB of par", text)
    assert held == pytest.approx(whole / 2, rel=0.05)


def test_hierarchy(tmp_path: Path) -> None:
    text = printed("hierarchy.py", tmp_path)
    one_hop, two_hops = numbers(r"loss (\S+),", text)
    assert one_hop < UNTRAINED / 10
    assert two_hops == pytest.approx(one_hop, abs=0.02)
    assert "replicas identical: True" in text
    flat, two = numbers(r"about (\S+) MB of that crosses", text)
    assert flat == pytest.approx(2 * two, abs=0.002)
    # The example's arithmetic explains the bytes that were counted: with one hop two of three
    # messages cross; with two, lm4 crosses and comes back, and int8 stays inside.
    sent_flat, sent_two = numbers(r"(\S+) MB sent", text)
    assert sent_flat == pytest.approx(flat * 3 / 2, rel=0.05)
    assert sent_two == pytest.approx(two * (1 + 1 + 8.125 / 4.125), rel=0.05)


def test_monitor(tmp_path: Path) -> None:
    text = printed("monitor.py", tmp_path)
    assert numbers(r"zcomm step (\d+):", text) == [20, 40, 60]
    errors = dict(re.findall(r"^(\d\.\w+) .* (\S+)%$", text, re.M))
    assert {name for name, error in errors.items() if float(error) == 0} == {
        f"{layer}.bias" for layer in (0, 2, 4)
    }
    assert 0.1 < float(errors["4.weight"]) < 1  # int8
    for name in ("0.weight", "2.weight"):
        assert 5 < float(errors[name]) < 11  # lm4
    [ratio] = numbers(r"(\S+) times fewer", text)
    assert ratio > 7


def test_codecs(tmp_path: Path) -> None:
    text = printed("codecs.py", tmp_path)
    rows = re.findall(r"^(\S+) +(\S+)x +(\S+)% +(\S+)%$", text, re.M)
    measured = {spec: tuple(map(float, figures)) for spec, *figures in rows}
    assert measured["int8"][0] == 3.9
    assert measured["lm4"][0] == measured["int4"][0] == 7.8
    # Outliers ruin int4 and leave lm4 alone.
    assert measured["lm4"][2] < 10 < 20 < measured["int4"][2]
    for without, with_feedback in re.findall(r"error (\S+)%, with feedback (\S+)%", text):
        assert float(with_feedback) < float(without) / 5
    assert "one flipped bit is refused: wire 0: expected checksum" in text
