"""What to test, and a tally of checks and failures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from zcomm.conformance.contract import SPECS, Subject, difference
from zcomm.report.finding import OK, PROBLEM, Finding, reason

DO_NOT_TRAIN = "Do not train with these kernels on this device; send us this report."
_SHOWN = 6
_KEPT = 40


class Scope(NamedTuple):
    """What to test, the same for all parts."""

    subject: Subject
    quick: bool = False
    specs: tuple[str, ...] = tuple(SPECS)


class Tally:
    """Counts checks and keeps failures, by codec."""

    def __init__(self) -> None:
        self.checks = 0
        self.wrong: dict[str, list[str]] = {}

    def same(self, spec: str, what: str, got: Tensor, expected: Tensor) -> None:
        found = difference(got, expected)
        self.expect(spec, f"{what}: {found}" if found else "")

    def expect(self, spec: str, fault: str) -> None:
        """One more check; "" is no fault."""
        self.checks += 1
        if fault:
            self.wrong.setdefault(spec, []).append(fault)

    @contextmanager
    def guarded(self, spec: str, what: str) -> Iterator[None]:
        """Records an exception as a fault of this codec and goes on with the next check."""
        try:
            yield
        except Exception as error:
            self.expect(spec, f"{what}: {type(error).__name__}: {reason(str(error))}")

    def finding(self, right: str) -> Finding:
        counts = {spec: len(faults) for spec, faults in self.wrong.items()}
        details = {"checks": self.checks, "wrong": counts}
        if not self.wrong:
            return Finding(OK, [f"{right}: {self.checks:,} checks"], "", details)
        # One of each codec first, so that a codec that always fails does not hide the others.
        firsts = [f"{spec}: {faults[0]}" for spec, faults in self.wrong.items()]
        kept = [f"{spec}: {fault}" for spec, faults in self.wrong.items() for fault in faults]
        lines = [
            f"{sum(counts.values()):,} of {self.checks:,} checks failed: "
            + ", ".join(f"{spec} {count:,}" for spec, count in counts.items()),
            *firsts[:_SHOWN],
        ]
        return Finding(PROBLEM, lines, DO_NOT_TRAIN, {**details, "first": kept[:_KEPT]})
