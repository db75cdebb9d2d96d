"""The results of the demo: a table for the terminal, a page, a picture and JSON."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import zcomm
from zcomm.cli.demo import gpt, training
from zcomm.cli.demo.training import MODEL, VARIANTS, Outcome
from zcomm.launch import machine
from zcomm.report import page as report
from zcomm.report import plot, table
from zcomm.report.units import show_bytes, show_seconds

SMOOTHED_STEPS = 10
LAST_STEPS = 20  # the final loss is a mean over these: the batches are small
HEADINGS = ("variant", "loss", "held-out", "step", "sent/step", "optimizer", "speed-up")


@dataclass(frozen=True)
class DemoRow:
    """One variant, over all ranks. Bytes are per rank."""

    way: str
    loss: float  # mean of the last steps
    held_out: float
    step_s: float  # median
    sent: float  # per step, at the interface; median of the turns
    optimizer_nbytes: int
    speedup: float  # over the first variant
    replicas_identical: bool

    def cells(self) -> list[str]:
        return [
            self.way,
            f"{self.loss:.3f}",
            f"{self.held_out:.3f}",
            show_seconds(self.step_s),
            show_bytes(self.sent),
            show_bytes(self.optimizer_nbytes),
            f"{self.speedup:.2f}×",
        ]


class Result:
    def __init__(
        self,
        by_rank: Sequence[Sequence[Outcome]],
        link: str,
        on_loopback: bool,
        command: str,
        total_s: float,
    ) -> None:
        self.world_size = len(by_rank)
        self.link, self.on_loopback = link, on_loopback
        self.command, self.total_s = command, total_s
        self.outcomes = by_rank[0]
        baseline_s = statistics.median(self.outcomes[0].seconds)
        self.rows = [
            row_of(variant.name, of_ranks, baseline_s)
            for variant, of_ranks in zip(VARIANTS, zip(*by_rank, strict=True), strict=True)
        ]

    @property
    def steps(self) -> int:
        return len(self.outcomes[0].losses)

    @property
    def identical(self) -> bool:
        return all(row.replicas_identical for row in self.rows)

    def replicas(self) -> str:
        differ = [row.way for row in self.rows if not row.replicas_identical]
        if differ:
            return f"The replicas DIFFER: {', '.join(differ)}. This is a bug in zcomm."
        return f"After step {self.steps} all replicas were identical, bit for bit."

    def text_table(self) -> str:
        return table.whole(HEADINGS, [row.cells() for row in self.rows])

    def plots(self) -> list[str]:
        curves = [smoothed(outcome.losses) for outcome in self.outcomes]
        seconds = [list(itertools.accumulate(one.seconds)) for one in self.outcomes]
        names = [row.way for row in self.rows]
        y_label = f"training loss, nats per byte, mean of {SMOOTHED_STEPS} steps"
        over_steps = [
            plot.Series(name, range(1, len(curve) + 1), curve) for name, curve in zip(names, curves)
        ]
        over_seconds = [plot.Series(*one) for one in zip(names, seconds, curves)]
        time, title = "seconds of training, this variant alone", "Bytes on the network"
        sent, label = [row.sent for row in self.rows], "sent per step and rank, including headers"
        return [
            plot.lines(over_steps, title="Loss over steps", x_label="step", y_label=y_label),
            plot.lines(over_seconds, title="Loss over seconds", x_label=time, y_label=y_label),
            plot.bars(names, sent, title=title, label=label, show=show_bytes),
        ]

    def picture(self) -> str:
        return plot.side_by_side(self.plots(), name="zcomm demo: a small GPT trained four ways")

    def page(self) -> str:
        first = ("variant", "loss", "held-out loss", "step", "sent per step")
        headings = (*first, "optimizer state per rank", "speed-up")
        cells = [row.cells() for row in self.rows]
        figures = report.table(headings, cells, marked=len(cells) - 1)
        compared = f"{VARIANTS[-1].name}, compared with {VARIANTS[0].name}"
        sections = [
            report.section(compared, "", self.facts()),
            report.section("The training", self.introduction(), *self.plots()),
            report.section("The figures", f"{self.replicas()} {self.explanation()}", figures),
        ]
        return report.page("zcomm demo: one small GPT, trained four ways", self.about(), sections)

    def facts(self) -> str:
        first, last = self.rows[0], self.rows[-1]
        return report.tiles(
            [
                (f"{last.speedup:.2f}×", "the speed"),
                (f"{first.sent / last.sent:.1f}×", "fewer bytes on the network"),
                (f"1/{first.optimizer_nbytes / last.optimizer_nbytes:.2g}", "the optimizer state"),
                (percent(last.held_out / first.held_out - 1), "held-out loss"),
            ]
        )

    def introduction(self) -> str:
        words = f"{about_training()} {self.link}"
        if self.on_loopback:
            words += (
                " Bytes cost next to nothing there, so compression saves bytes and memory but no "
                "time. Run as root, or on a slow network, to see it save time."
            )
        return words + " Where lines overlap, their colors alternate."

    def explanation(self) -> str:
        return (
            f"Loss is the mean of the last {min(LAST_STEPS, self.steps)} steps, held-out loss that "
            "on text never trained on. A run this short shows that all variants learn, not "
            "which one learns best. Step time is the median of all steps. Bytes are counted at a "
            "rank's network interface. ZeRO's optimizer state is AdamW's; a rank also keeps fp32 "
            f"masters of the parameters it owns, {show_bytes(self.master_nbytes())} here."
        )

    def master_nbytes(self) -> int:
        """Of the last variant, on the rank that owns most."""
        model, last = gpt.GPT(**MODEL), VARIANTS[-1]
        codecs: dict[str, Any] = {"codec": last.codec, "param_codec": last.param_codec}
        return zcomm.plan(model, self.world_size, stage=1, **codecs).masters

    def about(self) -> dict[str, object]:
        tokens = training.tokens_per_step(self.world_size)
        return {
            "command": self.command,
            "link": self.link,
            **machine.describe(zcomm.__version__),
            "ranks": f"{self.world_size}, one thread each, over gloo",
            "model": ", ".join(f"{name} {value}" for name, value in MODEL.items())
            + f"; {training.parameter_count():,} parameters",
            "batch": f"{training.BATCH} windows a rank, {tokens} tokens per step",
            "optimizer": f"AdamW, peak learning rate {training.PEAK_LR:g}, warm-up, cosine",
            "steps": f"{self.steps}, in turns, with the same weights and batches",
            "text": f"Python's standard library, sha256 {gpt.standard_library().sha256[:16]}…",
            "total time": f"{self.total_s:.0f} s",
        }

    def as_json(self) -> dict[str, object]:
        ways = [
            {**asdict(row), "losses": one.losses, "seconds": one.seconds, "sent_by_turn": one.sent}
            for row, one in zip(self.rows, self.outcomes)
        ]
        return {"about": self.about(), "steps": self.steps, "ways": ways}


def row_of(name: str, of_ranks: Sequence[Outcome], baseline_s: float) -> DemoRow:
    first = of_ranks[0]
    step_s = statistics.median(first.seconds)
    return DemoRow(
        way=name,
        loss=statistics.fmean(first.losses[-LAST_STEPS:]),
        held_out=first.held_out,
        step_s=step_s,
        sent=statistics.median(first.sent),
        optimizer_nbytes=max(one.optimizer_nbytes for one in of_ranks),
        speedup=baseline_s / step_s,
        replicas_identical=len({one.digest for one in of_ranks}) == 1,
    )


def percent(difference: float) -> str:
    return f"{round(100 * difference, 1) + 0.0:+.1f}%".replace("-", "−")  # never -0.0


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and those just before it."""
    windows = (losses[max(0, i - SMOOTHED_STEPS) : i] for i in range(1, len(losses) + 1))
    return [statistics.fmean(window) for window in windows]


def about_training() -> str:
    return (
        f"A GPT with {training.parameter_count() / 1e6:.1f}M parameters learns the source of "
        "Python's standard library. Four variants take turns."
    )
