"""Cluster: the devices that a spec asks for, the part of it that costs are taken from.

Sizes are in bytes, times in seconds, rates in bytes or FLOP per second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of the cluster."""

    kind: Literal["cpu", "cuda"]
    memory: int
    """Bytes."""
    flops: Mapping[str, float]
    """Precision -> dense FLOP/s; it has fp32, fp64 and bf16."""
    memory_bandwidth: float
    """Bytes/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    bandwidth: float
    """Bytes/s in one direction between two devices."""
    latency: float
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    intra_node: Link
    inter_node: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    nodes: int = 1
    devices_per_node: int
    device: Device
    links: Links

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node
