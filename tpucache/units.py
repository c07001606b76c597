"""Durations, numbers of bytes and measured numbers as text for people."""

from __future__ import annotations

from typing import Final

#: Units of bytes with their sizes, the largest first.
SCALES: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration_text(seconds: float) -> str:
    """Return a duration as text with at most two units, such as `45 s`, `3 min 20 s` or `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def seconds_text(seconds: float) -> str:
    """Return a duration as text in suitable precision, such as `0.4 s`, `25 s` or `3 min 20 s`."""
    return f"{seconds:.1f} s" if seconds < 10 else duration_text(seconds)


def size_text(count: float) -> str:
    """Return a number of bytes as text, such as `491.7 MB`."""
    for scale, name in SCALES:
        if count >= scale:
            return f"{count / scale:,.1f} {name}"
    return f"{count:,.0f} bytes"


def rate_text(value: float) -> str:
    """Return a measured number as text, such as `1,234` or, below 10, with one decimal, as `4.2`."""
    return f"{value:,.1f}" if 0 < value < 9.95 else f"{value:,.0f}"
