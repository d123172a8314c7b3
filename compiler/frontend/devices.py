"""Devices known by name, and the links usual between them.

Figures are the makers' published peaks: dense, without structured sparsity, without TF32; fp64 with
tensor cores where there are any, as cuBLAS uses them; bf16 with tensor cores, fp32's figure for the
V100, which has none for it; memory in decimal GB as on the sheet, which
leaves a few per cent for the driver; links in one direction, half of what NVLink's sheets add up.
Sources: NVIDIA's data sheets "V100 Tensor Core GPU" (SXM2, 32 GB), "A100 80GB Tensor Core GPU"
(SXM), "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU" (SXM). Between nodes: one network
port for each GPU, as in the DGX systems of each generation (100, 200, 400 and 400 Gbit/s).
Latencies are the usual few microseconds of NCCL's point-to-point.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ..ir.cluster import Device, Link, Links


def gpu(
    *, memory: float, fp32: float, fp64: float, bf16: float,
    bandwidth: float, nvlink: float, network: float,
) -> tuple[Device, Links]:  # fmt: skip
    device = Device(
        kind="cuda",
        memory=int(memory),
        flops={"fp32": fp32, "fp64": fp64, "bf16": bf16},
        memory_bandwidth=bandwidth,
    )
    intra_node = Link(bandwidth=nvlink, latency=5e-6)
    return device, Links(intra_node=intra_node, inter_node=Link(bandwidth=network, latency=1e-5))


known: Mapping[str, tuple[Device, Links]] = MappingProxyType(
    {
        # One process on one or two cores of a common server; gloo over loopback and 10 Gbit/s.
        "cpu": (
            Device(
                kind="cpu",
                memory=8 << 30,
                flops={"fp32": 50e9, "fp64": 25e9, "bf16": 50e9},
                memory_bandwidth=20e9,
            ),
            Links(
                intra_node=Link(bandwidth=2e9, latency=1e-4),
                inter_node=Link(bandwidth=1.25e9, latency=2e-4),
            ),
        ),
        "v100": gpu(
            memory=32e9,
            fp32=15.7e12,
            fp64=7.8e12,
            bf16=15.7e12,
            bandwidth=900e9,
            nvlink=150e9,
            network=12.5e9,
        ),
        "a100": gpu(
            memory=80e9,
            fp32=19.5e12,
            fp64=19.5e12,
            bf16=312e12,
            bandwidth=2039e9,
            nvlink=300e9,
            network=25e9,
        ),
        "h100": gpu(
            memory=80e9,
            fp32=67e12,
            fp64=67e12,
            bf16=989.5e12,
            bandwidth=3350e9,
            nvlink=450e9,
            network=50e9,
        ),
        "h200": gpu(
            memory=141e9,
            fp32=67e12,
            fp64=67e12,
            bf16=989.5e12,
            bandwidth=4800e9,
            nvlink=450e9,
            network=50e9,
        ),
    }
)

# A GPU given by its figures alone: PCIe 4.0 x16 within the node, 100 Gbit/s between nodes.
unknown_gpu_links = Links(
    intra_node=Link(bandwidth=25e9, latency=1e-5), inter_node=Link(bandwidth=12.5e9, latency=2e-5)
)
