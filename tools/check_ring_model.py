"""Checks the model of the ring with spin: it must hold, and break with each planted mistake.

csrc/shm/ring.pml says what the model is. A model that holds is searched to its end; a mistake is
searched until it is found. Needs spin and a C compiler.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

MODEL = Path(__file__).parents[1] / "csrc" / "shm" / "ring.pml"
_DEEPEST = 1_000_000

ALL_KINDS = ("ALL_REDUCE", "REDUCE_SCATTER", "ALL_GATHER")


class Case(NamedTuple):
    """A size of the model. `kind` None: each job is of any kind."""

    ranks: int
    slots: int = 4
    jobs: int = 1
    chunks: int = 6
    kind: str | None = None
    mistake: str = "NONE"
    cycles: bool = False

    def __str__(self) -> str:
        jobs = f"{self.jobs} jobs" if self.jobs > 1 else "1 job"
        text = f"{self.ranks} ranks, {self.slots} slots, {jobs} of {self.chunks} chunks, "
        text += (self.kind or "any kind").lower().replace("_", "-")
        return text + (", cycles" if self.cycles else "")

    def defines(self) -> list[str]:
        names = {"RANKS": self.ranks, "SLOTS": self.slots, "JOBS": self.jobs}
        values = names | {"CHUNKS": self.chunks, "MISTAKE": self.mistake}
        if self.kind:
            values["KIND"] = self.kind
        return [f"-D{name}={value}" for name, value in values.items()]


# A hop alone needs two slots. In an all-reduce, chunk i is published before chunk i - 2 is
# collected, so it needs three; the ring has four or eight.
HOLDS = [
    Case(2, jobs=2),
    Case(2, jobs=3, chunks=3),
    Case(2, slots=3, jobs=2, chunks=5, cycles=True),
    *(Case(3, kind=kind) for kind in ALL_KINDS),
    *(Case(3, slots=2, chunks=4, kind=kind) for kind in ALL_KINDS[1:]),
    Case(3, slots=3, jobs=2, chunks=2),
    Case(2, jobs=2, mistake="LOOKS_FIRST"),
]


def mistakes() -> list[Case]:
    listed = MODEL.read_text().partition("#define NONE 0")[2].partition("/* No mistake")[0]
    found = re.findall(r"^#define (\w+) \d+", listed, re.M)
    # With two ranks there is never a second sleeper.
    cases = [Case(3 if name == "WAKES_ONE" else 2, mistake=name) for name in found]
    return [*cases, Case(2, slots=2, kind="ALL_REDUCE")]


class Found(NamedTuple):
    errors: int
    what: str
    states: int
    complete: bool


def search(case: Case, folder: Path) -> Found:
    """Every order of steps, up to the first error."""
    subprocess.run(["spin", "-a", *case.defines(), str(MODEL)], cwd=folder, check=True)
    # For two ranks, compiling takes longer than the search.
    level = "-O0" if case.ranks == 2 else "-O1"
    purpose = "-DNP" if case.cycles else "-DSAFETY"
    compiled = ["cc", "-w", level, purpose, "-DCOLLAPSE", "-o", "pan", "pan.c"]
    subprocess.run(compiled, cwd=folder, check=True)
    run = ["./pan", f"-m{_DEEPEST}", *(["-l"] if case.cycles else [])]
    text = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False).stdout
    errors, states = re.search(r"errors: (\d+)", text), re.search(r"(\d+) states, stored", text)
    what = re.search(r"^pan:\d+: (.*) \(at depth", text, re.M)
    if errors is None or states is None:
        raise SystemExit(f"{case}: expected a result of spin, got:\n{text}")
    complete = "not completed" not in text and "depth too small" not in text
    return Found(int(errors[1]), what[1] if what else "", int(states[1]), complete)


def check(case: Case, *, holds: bool) -> bool:
    started = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = search(case, Path(folder))
    good = found.errors == 0 and found.complete if holds else found.errors > 0
    what = f"{found.states:,} states" if found.errors == 0 else found.what
    mistake = "" if case.mistake == "NONE" else f"{case.mistake.lower()}: "
    verdict = "ok" if good else "FAILED"
    print(f"{verdict:8}{mistake}{case}: {what}, {perf_counter() - started:.1f} s", flush=True)
    return good


def main() -> int:
    if shutil.which("spin") is None or shutil.which("cc") is None:
        raise SystemExit("expected spin and cc on PATH: install the packages spin and gcc")
    print("The model holds:")
    results = [check(case, holds=True) for case in HOLDS]
    print("Mistakes are found:")
    results += [check(case, holds=False) for case in mistakes()]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
