"""GPU data sheets: dense bf16 matrix products with fp32 sums, memory, bandwidth.
Torch-free.
"""

from __future__ import annotations

from typing import NamedTuple

from drafters.base.errors import unknown_name


class Gpu(NamedTuple):
    """One device: dense bf16 FLOP/s (no sparsity), bytes of memory, bytes a second from it."""

    flops: float
    memory: float
    bandwidth: float


GPUS = {
    "A10G": Gpu(70e12, 24e9, 0.6e12),
    "A100-40GB": Gpu(312e12, 40e9, 1.555e12),
    "A100": Gpu(312e12, 80e9, 2.039e12),
    "B200": Gpu(2250e12, 180e9, 7.7e12),
    "H100-PCIe": Gpu(756e12, 80e9, 2.0e12),
    "H100": Gpu(989e12, 80e9, 3.35e12),
    "H200": Gpu(989e12, 141e9, 4.8e12),
    "L4": Gpu(121e12, 24e9, 0.3e12),
    "L40S": Gpu(362e12, 48e9, 0.864e12),
    "MI300X": Gpu(1307e12, 192e9, 5.3e12),
    "RTX-3090": Gpu(71e12, 24e9, 0.936e12),
    "RTX-4090": Gpu(165e12, 24e9, 1.008e12),
    "RTX-6000-Ada": Gpu(364e12, 48e9, 0.96e12),
}
USABLE = 0.92  # of a GPU's memory: the rest goes to the context, the communication library and fragments


def gpu_named(name: str) -> Gpu:
    """A GPU of the table, whatever the case. Raises `UserError` with the nearest name."""
    known = {entry.lower(): gpu for entry, gpu in GPUS.items()}
    if name.lower() not in known:
        raise unknown_name("GPU", name, GPUS)
    return known[name.lower()]


def gpu_of_device(device_name: str) -> Gpu | None:
    """The table's entry for what the driver calls a device, such as 'NVIDIA H100 80GB HBM3'; None where it is not
    known.
    """
    words = device_name.lower().replace("-", " ").split()
    fits = [name for name in GPUS if all(part in words for part in name.lower().split("-"))]
    return GPUS[max(fits, key=len)] if fits else None
