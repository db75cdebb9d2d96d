"""Numbers as people type and read them: 64K, 1gbit, 7e9, 1.2 GB."""

import re

from zcomm.report.usage import UsageError

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
# Far beyond any machine, and small enough that nothing computed from them overflows.
MOST_BYTES = float(1 << 60)
MOST_COUNT = 1e15
_LEAST_RATE, _MOST_RATE = 1e6, 1e15
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def parse_size(text: str) -> int:
    """Bytes: 1000, 64K, 256M, 1G; powers of 1024, as in nccl-tests."""
    found = re.fullmatch(rf"{_NUMBER}([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = float(found[1]) * _BINARY[found[2].upper()] if found else 0.0
    if not 1 <= nbytes <= MOST_BYTES:
        raise UsageError(f"expected a size such as 64K, 16M or 1G, got {text!r}")
    return int(nbytes)


def parse_rate(text: str) -> float:
    """Bits per second, as tc writes them: 1gbit is 1e9."""
    given = text.strip().lower()
    if found := re.fullmatch(rf"{_NUMBER}([kmgt]?)(?:bps|b/s)", given):
        right = f"{found[1]}{found[2]}bit"
        raise UsageError(
            f"expected a rate in bits, such as {right}, got {text!r}: tc takes bps for bytes per "
            f"second; write {right}"
        )
    found = re.fullmatch(rf"{_NUMBER}([kmgt]?)bit(?:/s)?", given)
    rate = float(found[1]) * _DECIMAL[found[2]] if found else 0.0
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise UsageError(
            f"expected a rate such as 1gbit or 500mbit, from 1mbit to 1000tbit, got {text!r}"
        )
    return rate


def parse_count(text: str) -> int:
    """A count: 25_000_000, 7e9, 7B, 350M."""
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)", text.strip().lower())
    number = float(found[1].replace("_", "")) * _DECIMAL[found[2]] if found else 0.0
    if not 1 <= number <= MOST_COUNT:
        raise UsageError(f"expected a number such as 7e9, 7B or 350M, up to 1e15, got {text!r}")
    return round(number)


def show_bytes(nbytes: float) -> str:
    """Three digits, powers of 1000: 101 MB, 6.71 GB."""
    return _show(nbytes, "B")


def show_rate(bytes_per_s: float) -> str:
    return _show(bytes_per_s, "B/s")


def show_bit_rate(bytes_per_s: float) -> str:
    """As networks are sold: 1.00 Gbit/s."""
    return _show(8 * bytes_per_s, "bit/s")


def _show(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    digits = 0 if not prefix or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}{unit}"


def show_seconds(s: float) -> str:
    """Three digits: 12.3 µs, 364 ms, 2.10 s."""
    for scale, unit in ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")):
        if abs(s) < 999.5 * scale or unit == "s":
            break
    value = s / scale
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
