"""Quantities with units -> plain numbers: `80GiB` -> bytes, `450GB/s` -> bytes/s, `5us` -> seconds.

The patterns of schemas/spec.schema.json admit exactly what is read here.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

bytes_units: Mapping[str, float] = MappingProxyType(
    {
        "B": 1,
        **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), 1)},
        **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
    }
)
bandwidth_units: Mapping[str, float] = MappingProxyType(
    {
        **{f"{unit}/s": factor for unit, factor in bytes_units.items()},
        "Mbit/s": 1e6 / 8,
        "Gbit/s": 1e9 / 8,
        "Tbit/s": 1e12 / 8,
    }
)
duration_units: Mapping[str, float] = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
)
flops_units: Mapping[str, float] = MappingProxyType(
    {"MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
)


def parse_quantity(value: float | str, units: Mapping[str, float]) -> float:
    """The value in the unit whose factor is 1. Raises ValueError for text that is no quantity."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(\D+)", value)
    if match is None or match[2] not in units:
        raise ValueError(f"{value!r} is not a number with one of {', '.join(units)}")
    return float(match[1]) * units[match[2]]
