"""Numbers as people read them."""

from __future__ import annotations

NONE = "–"
UNFINISHED = "†"
# One wording for the page and the terminal; in the paper's Table 2 it is of the whole training.
SPEEDUP = (
    "Speed-up: Implicit's time per step, mean over the whole training, divided by the method's; "
    "ms / step is the median of the log lines, so its ratios may be others"
)


def shown(value: object, form: str = "") -> str:
    """In a format, or as text; a dash where there is nothing."""
    return NONE if value is None else format(value, form) if form else str(value)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    unit, name = time_unit(seconds)
    form = ".3g" if seconds < 100 * unit else ".0f"
    return f"{seconds / unit:{form}} {name}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time of this size is told."""
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def milliseconds(value: float | None) -> str:
    return shown(value, ".1f" if value is not None and value < 100 else ".0f")


def speedup(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}×"


def scientific(value: float) -> str:
    """A number of any size in few characters: 0.02, 3·10⁻⁷, 10⁻⁵."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    digits, _, power = f"{value:.1e}".partition("e")
    raised = "10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return raised if digits == "1.0" else f"{digits.removesuffix('.0')}·{raised}"
