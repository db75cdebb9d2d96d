"""The results tables: which files in benchmarks/results each one reads, its columns and formats."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Results = dict[str, Any]
Format = Callable[[Any], str]
Lines = Iterator[list[str]]
Column = tuple[str, str, Format]  # head, field of the row, format


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    files: Sequence[str]
    lines: Callable[..., Lines]


# The tests of `make test-torch`, by what they are about.
TORCH_AREAS = {
    "hook": ("tests/ddp", "tests/sharding"),
    "ZeRO": ("tests/zero",),
    "collectives": ("tests/test_collectives.py",),
    "checkpoints": (
        "tests/checkpoint",
        "tests/zero/test_checkpoints.py",
        "tests/zero/test_elastic.py",
    ),
    "failures": ("tests/engine/test_failures.py", "tests/transport"),
    "private names": ("tests/torch_private",),
    "FSDP2": ("tests/fsdp",),
}


# Formats.


def code(value: str) -> str:
    return f"`{value}`"


def number(digits: int) -> Format:
    """Prints None as a dash and a plain 0 as 0."""

    def formatted(value: float | None) -> str:
        return "–" if value is None else f"{value:.{digits}f}" if value else "0"

    return formatted


def error(value: float) -> str:
    """0.0092, or 2.8e-6."""
    if value == 0 or value >= 1e-3:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def signed(value: float) -> str:
    return f"{value:+.2f}"


def link(value: str) -> str:
    return {"1gbit": "1 Gbit/s", "loopback": "loopback"}[value]


def codecs(value: str) -> str:
    """gloo's collective, a codec, or local/across."""
    if value == "gloo":
        return "gloo's own"
    local, _, across = value.partition("/")
    return f"{code(local)}, {code(across)} between hosts" if across else code(local)


def step_way(value: str) -> str:
    names = {"plain DDP": value, "nothing": "no communication", "DDP + AdamW": value}
    return names.get(value, code(value))


def zero_way(value: str) -> str:
    if not value.startswith("zero "):
        return value
    gradients, _, parameters = value.removeprefix("zero ").partition("+")
    return f"{code(gradients)}, {parameters_way(parameters)}"


def parameters_way(codec: str) -> str:
    return f"parameters {code(codec)}" if codec else "exact parameters"


def fsdp_way(value: str) -> str:
    stage, gradients = value.split(" ")
    if gradients == "plain":
        return f"stage {stage}, plain FSDP2"
    gradients, _, parameters = gradients.partition("+")
    return f"stage {stage}, {code(gradients)}, {parameters_way(parameters)}"


# Kinds of tables.


def plain(
    files: Sequence[str], columns: Sequence[Column], where: Callable[[Row], bool] = lambda row: True
) -> Table:
    """One line per row of the files."""

    def lines(*found: Results) -> Lines:
        for row in (row for one in found for row in one["rows"] if where(row)):
            yield [form(row.get(field)) for _, field, form in columns]

    return Table([head for head, *_ in columns], files, lines)


def bars(*files: str) -> Table:
    def lines(*found: Results) -> Lines:
        for bar in (bar for one in found for bar in one["bars"]):
            sign = "≤" if bar["most"] else "≥"
            met = "**missed**" if bar["missed"] else "met"
            yield [bar["name"], f"{sign} {bar['bar']:g}", f"{bar['measured']:.3g}", met]

    return Table(("bar", "required", "measured", ""), files, lines)


def codec_speed(file: str, tasks: dict[str, str]) -> Table:
    """One line per codec, one column per task."""

    def lines(found: Results) -> Lines:
        values = {row["name"]: row["value"] for row in found["rows"]}
        names = dict.fromkeys(name.partition(" ")[0] for name in values)
        for name in names:
            yield [code(name), *(number(2)(values[f"{name} {task}"]) for task in tasks.values())]

    return Table(("codec", *tasks), (file,), lines)


def rivals(*found: Results) -> Lines:
    against = ("plain torch", "bitsandbytes", "torch.topk")
    names = [row["name"] for row in found[0]["rows"] if row["name"].endswith(against)]
    for name in names:
        rows = [row for one in found for row in one["rows"] if row["name"] == name]
        values = ["not installed" if row["value"] is None else f"{row['value']:g}" for row in rows]
        yield [name, *values, f"{rows[0]['bar']:g}"]


def ranges(found: Results) -> Lines:
    for row in found["rows"]:
        yield [row["name"], f"{row['least']:.2f} to {row['most']:.2f}", f"{row['bar']:.2f}"]


def torch_versions(found: Results) -> Lines:
    for row in found["rows"]:
        yield [row["torch"], *(outcomes(row["areas"].get(area)) for area in TORCH_AREAS)]


def outcomes(counts: dict[str, int] | None) -> str:
    """What became of an area's tests; None: this torch cannot run them."""
    if counts is None:
        return "refused"
    said = [f"{counts[what]} {what}" for what in ("passed", "failed", "skipped") if what in counts]
    return ", ".join(said)


def cost_model(found: Results) -> Lines:
    rows = found["rows"]
    for codec in dict.fromkeys(row["codec"] for row in rows):
        mine = [row for row in rows if row["codec"] == codec]
        times = [f"{row['measured_ms']:.0f} / {row['predicted_ms']:.0f}" for row in mine]
        yield [codecs(codec), *times]


def feedback(row: Row) -> str:
    if row["feedback"] is None:
        return "–"
    names = {False: "without", True: "with"}
    name = names[row["feedback"]] if row["feedback"] in names else f"decay {row['feedback']}"
    return name + ", default" * row["is_default"]


def convergence(found: Results) -> Lines:
    for row in found["rows"]:
        low, high = min(row["differences"]), max(row["differences"])
        yield [
            code(row["name"]),
            feedback(row),
            str(row["steps"]),
            str(row["start_step"]),
            f"{statistics.fmean(row['losses']):.4f}",
            signed(statistics.fmean(row["differences"])),
            f"{signed(low)} … {signed(high)}",
        ]


def fsdp_convergence(found: Results) -> Lines:
    for row in found["rows"]:
        yield [
            fsdp_way(row["way"]),
            f"{statistics.fmean(row['losses']):.4f}",
            signed(statistics.fmean(row["differences"])),
            ", ".join(signed(one) for one in row["differences"]),
        ]


def quality(found: Results) -> Lines:
    for row in found["rows"]:
        sums = row["sum_error"], row["sum_error_with_feedback"]
        errors = [error(value) for value in (*row["errors"].values(), *sums)]
        yield [code(row["codec"]), f"{row['bits']:.3f}", *errors]


def codec_costs(quality: Results, converged: Results, speed: Results) -> Lines:
    """What docs/codecs.md says about each codec."""
    loss = {
        row["codec"]: statistics.fmean(row["differences"])
        for row in reversed(converged["rows"])  # plain rows come first and win
        if row["is_default"] and row["steps"] == 250 and row["name"] == row["codec"]
    }
    fraction = {row["name"]: row["value"] for row in speed["rows"]}
    for row in quality["rows"]:
        name = row["codec"]
        yield [
            code(name),
            f"{row['bits']:.3f}",
            f"{32 / row['bits']:.1f}",
            *(error(value) for value in row["errors"].values()),
            signed(loss[name]) if name in loss else "–",
            *(f"{fraction[f'{name} {task}']:.2f}" for task in ("encode+residual", "decode_sum")),
        ]


def pair(what: str, before: Row, after: Row) -> list[str]:
    """A row without zcomm, and one with it."""
    digits = 0 if before["ms"] >= 20 else 2
    return [
        what,
        *(f"{r['ms']:.{digits}f} ms" for r in (before, after)),
        f"{after['speedup']:.2f}×",
    ]


def by_way(found: Results) -> dict[str, Row]:
    return {row["way"]: row for row in found["rows"]}


def collective(found: Results, kind: str, size_mb: float, ranks: int) -> dict[str, Row]:
    """The rows of one collective, by codec."""
    wanted = kind, size_mb, ranks
    rows = found["rows"]
    return {r["codec"]: r for r in rows if (r["kind"], r["size_mb"], r["ranks"]) == wanted}


def headline(steps: Results, zero: Results, fsdp: Results, collectives: Results) -> Lines:
    """Pairs of rows between hosts, from several benchmarks."""

    def sent(what: str, before: Row, after: Row) -> list[str]:
        mb = f"{before['sent_mb']:.1f} → {after['sent_mb']:.1f}"
        return [*pair(what, before, after), mb]

    ddp, sharded, staged = by_way(steps), by_way(zero), by_way(fsdp)
    for codec in ("int8", "lm4"):
        yield sent(f"DDP step, `{codec}`", ddp["plain DDP"], ddp[codec])
    both = sharded["DDP + AdamW"], sharded["zero lm4+lm4"]
    yield sent("ZeRO step, `lm4` gradients and parameters, against DDP", *both)
    both = staged["3 plain"], staged["3 lm4+int8"]
    yield sent("FSDP2 stage 3 step, `lm4` gradients, `int8` parameters", *both)
    own = collective(collectives, "all_reduce", 100.0, 2)
    yield sent("all_reduce of 100 MB, `lm4`, against gloo's own", own["gloo"], own["lm4"])


def automatic(*found: Results) -> Lines:
    """Each layout and link: the codec that was chosen, and what a step takes."""
    for row in (row for one in found for row in one["rows"]):
        ms = [number(0)(row["ms"].get(way)) for way in ("plain DDP", *AUTO_CODECS, "auto")]
        best = statistics.median(row["of_best"])
        off = row["off"].get(row["chosen"][-1])
        yield [
            row["layout"],
            AUTO_LINKS[row["link"]],
            ", ".join(code(one) for one in dict.fromkeys(row["chosen"])),
            *ms,
            f"{statistics.median(row['of_plain']):.2f} ({min(row['of_plain']):.2f})",
            f"{best:.2f}",
            "–" if off is None else f"{off:+.0%}",
        ]


def one_host(*found: Results) -> Lines:
    """Pairs of rows inside a host: with two ranks, and with four."""
    *by_ranks, collectives = found

    def pairs(ranks: int, steps: Results, zero: Results, fsdp: Results) -> Lines:
        ddp, sharded, staged = by_way(steps), by_way(zero), by_way(fsdp)
        yield pair("DDP step, `none`", ddp["plain DDP"], ddp["none"])
        yield pair("ZeRO step, exact, against DDP", sharded["DDP + AdamW"], sharded["zero none"])
        yield pair("FSDP2 stage 3 step, exact", staged["3 plain"], staged["3 none"])
        for size_mb, size in ((100.0, "100 MB"), (0.001, "1 KB")):
            own = collective(collectives, "all_reduce", size_mb, ranks)
            yield pair(f"all_reduce of {size}, `none`", own["gloo"], own["none"])

    for two, four in zip(pairs(2, *by_ranks[:3]), pairs(4, *by_ranks[3:])):
        yield [*two, *four[1:]]


# The tables.

MS: Column = ("ms", "ms", number(0))
SENT: Column = ("MB sent", "sent_mb", number(1))
ZERO: tuple[Column, ...] = (
    ("gradients, parameters", "way", zero_way),
    MS,
    ("against DDP", "speedup", number(2)),
    ("against ZeroRedundancyOptimizer", "speedup_of_zero", number(2)),
    SENT,
    ("optimizer state", "state_peak", number(4)),
)
FSDP: tuple[Column, ...] = (
    ("stage, gradients, parameters", "way", fsdp_way),
    MS,
    ("against plain FSDP2", "speedup", number(2)),
    SENT,
)
COLLECTIVES: tuple[Column, ...] = (
    ("collective", "kind", str),
    ("codec", "codec", codecs),
    ("ranks", "ranks", str),
    MS,
    ("speed-up", "speedup", number(2)),
    SENT,
)
AUTO_CODECS = ("none", "bf16", "int8", "lm4")
AUTO_LINKS = {
    "loopback": "one host",
    "10gbit": "10 Gbit/s",
    "1gbit": "1 Gbit/s",
    "100mbit": "0.1 Gbit/s",
}
AUTO_FILES = ("auto_10gbit", "auto_1gbit", "auto_slow_1_1", "auto_slow_2_2", "auto_slow_3_1")
COST_MODEL = ["", *(f"{hosts} hosts: {mb} MB" for hosts in (2, 4) for mb in (12, 50, 100))]
STEPS = ("training_step", "zero", "fsdp")
ERRORS = ("Gaussian", "Student-t3", "Laplace with outliers")

TABLES = {
    "auto": Table(
        (
            "ranks",
            "link",
            "chosen",
            "plain DDP, ms",
            *(code(spec) for spec in AUTO_CODECS),
            "`auto`",
            "against plain (worst run)",
            "against the best",
            "prediction",
        ),
        AUTO_FILES,
        automatic,
    ),
    "auto-bars": bars(*AUTO_FILES),
    "headline": Table(
        ("two hosts, 1 Gbit/s, 25M parameters, AdamW", "plain", "zcomm", "speed-up", "MB sent"),
        ("training_step_hosts", "zero_hosts", "fsdp_hosts", "collectives_hosts"),
        headline,
    ),
    "demo": plain(
        ["demo"],
        [
            ("", "way", lambda way: "ZeRO, `lm4` both ways" if "+" in way else step_way(way)),
            ("ms per step", "ms", number(0)),
            SENT,
            ("held-out loss", "loss", number(3)),
        ],
    ),
    "codec-costs": Table(
        ("codec", "bits", "times fewer bytes", *ERRORS, "loss, %", "encode", "decode_sum"),
        ("codec_quality", "convergence", "codec_speed_avx2"),
        codec_costs,
    ),
    "codec-speed-avx2": codec_speed(
        "codec_speed_avx2",
        {
            "encode with residual": "encode+residual",
            "encode": "encode",
            "decode": "decode",
            "decode_sum of 4": "decode_sum",
            "bf16 gradient / fp32": "encode+residual, bf16 gradient / fp32",
            "2 threads: encode": "encode+residual, 2 threads",
            "2 threads: decode_sum": "decode_sum, 2 threads",
        },
    ),
    "codec-speed-avx512": codec_speed(
        "codec_speed_avx512",
        {
            "encode with residual": "encode+residual",
            "encode": "encode",
            "decode": "decode",
            "decode_sum of 4": "decode_sum",
            "AVX2: encode with residual": "encode+residual, avx2",
            "AVX2: decode_sum of 4": "decode_sum, avx2",
            "bf16 gradient / fp32": "encode+residual, bf16 gradient / fp32",
        },
    ),
    "codec-speed-rivals": Table(
        ("times as fast", "AVX2", "AVX-512", "bar"),
        ("codec_speed_avx2", "codec_speed_avx512"),
        rivals,
    ),
    "codec-speed-ranges": Table(
        ("row", "range over three runs", "bar"), ("codec_speed_ranges",), ranges
    ),
    "one-host": Table(
        (
            "one host",
            *("2 ranks: plain", "zcomm", "speed-up"),
            *("4 ranks: plain", "zcomm", "speed-up"),
        ),
        (*(f"{name}{of}" for of in ("", "_4") for name in STEPS), "collectives"),
        one_host,
    ),
    "collectives-hosts": plain(
        ["collectives_hosts"],
        [*COLLECTIVES, ("share of the line", "line_share", number(2))],
        lambda row: row["size_mb"] == 100,
    ),
    "collectives-loopback": plain(
        ["collectives"], COLLECTIVES[:-1], lambda row: row["size_mb"] == 100
    ),
    "collectives-sizes": plain(
        ["collectives", "collectives_hosts"],
        [
            ("link", "link", link),
            ("MB", "size_mb", lambda mb: f"{mb:g}"),
            *COLLECTIVES[:3],
            ("ms", "ms", number(2)),
            ("speed-up", "speedup", number(2)),
        ],
        lambda row: row["size_mb"] != 100 and row["kind"] == "all_reduce",
    ),
    "collectives-bars": bars("collectives_hosts", "collectives"),
    "collectives-two-hops": plain(
        ["collectives_two_hops"],
        [
            *(column for column in COLLECTIVES if column[0] not in ("ranks", "MB sent")),
            ("against one hop of `lm4`", "against_one_hop", number(2)),
            ("MB between hosts", "sent_mb", number(1)),
        ],
    ),
    "two-hops-bars": bars("collectives_two_hops"),
    "training-step": plain(
        ["training_step_hosts", "training_step", "training_step_4"],
        [
            ("link", "link", link),
            ("ranks", "ranks", str),
            ("", "way", step_way),
            MS,
            ("speed-up", "speedup", number(2)),
            ("exposed ms", "exposed_ms", number(0)),
            ("of plain DDP's", "exposed_share", number(2)),
            SENT,
        ],
    ),
    "training-step-bars": bars(
        "training_step_hosts", "training_step", "training_step_4", "training_memory"
    ),
    "zero": plain(
        ["zero_hosts", "zero", "zero_4"], [("link", "link", link), ("ranks", "ranks", str), *ZERO]
    ),
    "zero-bars": bars("zero_hosts", "zero", "zero_4"),
    "zero-hosts": plain(["zero_hosts"], ZERO, lambda row: "int8" not in row["way"]),
    "fsdp": plain(
        ["fsdp_hosts", "fsdp", "fsdp_4"], [("link", "link", link), ("ranks", "ranks", str), *FSDP]
    ),
    "fsdp-hosts": plain(["fsdp_hosts"], FSDP, lambda row: "none" not in row["way"]),
    "fsdp-bars": bars("fsdp_hosts", "fsdp", "fsdp_4", "fsdp_convergence"),
    "fsdp-convergence": Table(
        ("stage, gradients, parameters", "loss", "to plain FSDP2, %", "seeds, %"),
        ("fsdp_convergence",),
        fsdp_convergence,
    ),
    "torch-versions": Table(("torch", *TORCH_AREAS), ("torch_versions",), torch_versions),
    "cost-model": Table(COST_MODEL, ("cost_model",), cost_model),
    "monitor-cost": bars("monitor_cost"),
    "convergence": Table(
        ("codec", "feedback", "steps", "start_step", "loss", "to fp32, %", "seeds, %"),
        ("convergence",),
        convergence,
    ),
    "convergence-bars": bars("convergence"),
    "codec-quality": Table(
        ("codec", "bits per element", *ERRORS, "sum of 200 gradients", "with feedback"),
        ("codec_quality",),
        quality,
    ),
}
