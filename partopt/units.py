"""Bytes, rates and seconds, as people write them and as partopt prints them.

A quantity is a number and a unit: `16 GB`, `80 GiB`, `200 Gb/s`, `50 us`. `b` is a bit and `B` a
byte; a bare number is refused, because "200" for a 200 Gb/s link is wrong by a factor of 8e-9 or
1.25e8 and nothing downstream could notice. In files that partopt writes, every number is in SI base
units and its field's name says so.
"""

from __future__ import annotations

import math
import re

from partopt.errors import PartoptError

_PREFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6, "ns": 10**9}
_WATTS = {"W": 1, "kW": 10**3}
_DIGITS = ((0, 1_000), (1, 100), (2, 1))  # after the point, of numbers from so many on
_QUANTITY = re.compile(
    r"\s*(?P<number>[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(?P<unit>[A-Za-zµ]*(?:/s)?)\s*"
)
_SHARE = re.compile(r"\s*([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*%\s*")
_PRICE = re.compile(r"\s*([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s+per\s+hour\s*")
_SPEED_UNIT = re.compile(r"(?P<prefix>[MGTP]?)flop/s")
_DATA_UNIT = re.compile(r"(?P<prefix>(?:[kMGT]|[KMGT]i)?)(?P<base>[bB])(?P<rate>/s|ps)?")


def parse_bytes(text: object) -> int:
    """Bytes of a size such as `16 GB` or `80 GiB`.

    Raises PartoptError for a rate, for bits, or without a unit.
    """
    number, unit = _split(text, 'write "16 GB" or "16 GiB"')
    scale, is_bits, is_rate = _data_unit(text, unit, 'write "16 GB" or "16 GiB"')
    if is_rate:
        size = f"{number:g} {unit.removesuffix('/s').removesuffix('ps')}"
        raise _fault(text, " is a rate, not a size", f'write "{size}"')
    if is_bits:
        raise _fault(text, " is in bits", f'write "{number:g} {unit[:-1]}B" (bytes)')
    return round(_finite(text, number * scale))


def parse_bandwidth(text: object) -> float:
    """Bytes per second of a rate such as `200 Gb/s` (bits), `25 GB/s` (bytes) or `10 Gbps`.

    Raises PartoptError otherwise.
    """
    hint = 'write "200 Gb/s" (bits) or "200 GB/s" (bytes)'
    number, unit = _split(text, hint)
    scale, is_bits, is_rate = _data_unit(text, unit, hint)
    if not is_rate:
        raise _fault(text, " is a size, not a rate", f'write "{number:g} {unit}/s"')
    return _finite(text, number * scale / (8 if is_bits else 1))


def parse_flops(text: object) -> float:
    """Floating-point operations per second of a speed such as `312 Tflop/s`.

    Raises PartoptError otherwise.
    """
    hint = 'write "312 Tflop/s"'
    number, unit = _split(text, hint)
    match = _SPEED_UNIT.fullmatch(unit)
    if match is None:
        raise _fault(text, f": '{unit}' is not a unit of computing speed", hint)
    return _finite(text, number * _PREFIXES[match["prefix"]])


def parse_seconds(text: object) -> float:
    """Seconds of a duration such as `50 us` or `1.5 ms`. Raises PartoptError otherwise."""
    hint = 'write "50 us", "1.5 ms" or "2 s"'
    number, unit = _split(text, hint)
    if unit not in _PER_SECOND:
        raise _fault(text, f": '{unit}' is not a unit of time", hint)
    return _finite(text, number / _PER_SECOND[unit])


def parse_power(text: object) -> float:
    """Watts of a power such as `700 W` or `1.2 kW`. Raises PartoptError otherwise."""
    hint = 'write "700 W" or "1.2 kW"'
    number, unit = _split(text, hint)
    if unit not in _WATTS:
        raise _fault(text, f": '{unit}' is not a unit of power", hint)
    return _finite(text, number * _WATTS[unit])


def parse_share(text: object) -> float:
    """The ratio of a share such as `5%`. Raises PartoptError otherwise."""
    match = _SHARE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        bare = str(text).strip()
        number = bare if re.fullmatch(r"[0-9]+\.?[0-9]*", bare) else "5"
        raise _fault(bare, " is not a share in percent", f'write "{number}%"')
    return _finite(text, float(match[1]) / 100)


def parse_price(text: object) -> float:
    """Money an hour of a price such as `2.50 per hour`. Raises PartoptError otherwise."""
    match = _PRICE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        bare = str(text).strip()
        number = bare if re.fullmatch(r"[0-9]+\.?[0-9]*", bare) else "2.50"
        what = " has no unit" if number == bare else " is not a price"
        raise _fault(bare, what, f'write "{number} per hour", in any currency and without its sign')
    return _finite(text, float(match[1]))


def format_bytes(size: float) -> str:
    """`28.9 GB`: decimal prefix, three significant digits."""
    return _scale(size, "B")


def format_bandwidth(rate: float) -> str:
    """`12.5 GB/s`: bytes per second, decimal prefix, three significant digits."""
    return _scale(rate, "B/s")


def format_flops(speed: float) -> str:
    """`312 Tflop/s`: operations per second, decimal prefix, three significant digits."""
    return _scale(speed, "flop/s")


def format_seconds(seconds: float) -> str:
    """`42.34 ms`: in the largest of s, ms, us, ns with a digit other than zero before the point."""
    if seconds == 0:
        return "0 s"
    unit = next(
        (unit for unit, per_second in _PER_SECOND.items() if abs(seconds) * per_second >= 0.99995),
        "ns",
    )
    value = seconds * _PER_SECOND[unit]
    return f"{value:.{2 if abs(value) < 100 else 1}f} {unit}"


def format_count(count: float) -> str:
    """`14.1 M`: decimal prefix, three significant digits."""
    return _scale(count, "").strip()


def format_rate(per_second: float, of: str) -> str:
    """`975.6 samples/s`."""
    return f"{format_number(per_second)} {of}/s"


def format_number(value: float) -> str:
    """`975.6`: four significant digits, no point from 1,000 on."""
    rounded = float(f"{value:.4g}")
    return f"{value:,.{next((n for n, least in _DIGITS if rounded >= least), 4)}f}"


def _split(text: object, hint: str) -> tuple[float, str]:
    """The number and the unit of `text`; the number is not negative."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None and not isinstance(text, int | float):
        raise _fault(text, " is not a quantity", hint)
    if match is None or not match["unit"]:
        raise _fault(str(text).strip(), " has no unit", hint)
    return float(match["number"]), match["unit"]


def _data_unit(text: object, unit: str, hint: str) -> tuple[int, bool, bool]:
    """Scale of the prefix, whether it counts bits, whether it is per second."""
    match = _DATA_UNIT.fullmatch(unit)
    if match is None:
        known = "the prefixes are k M G T and Ki Mi Gi Ti"
        raise _fault(text, f": '{unit}' is not a unit of data", f"{hint}; {known}")
    return _PREFIXES[match["prefix"]], match["base"] == "b", match["rate"] is not None


def _finite(text: object, value: float) -> float:
    if not math.isfinite(value):
        raise _fault(text, " is too large", "write a finite quantity")
    return value


def _fault(text: object, what: str, hint: str) -> PartoptError:
    return PartoptError(f"'{text}'{what}", hint, code="malformed-quantity")


def _scale(value: float, unit: str) -> str:
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while abs(value) >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.3g} {prefixes[0]}{unit}"
