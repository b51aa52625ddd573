"""The table of GPUs is found by the names people and drivers use."""

from __future__ import annotations

import pytest

from drafters.base.errors import UserError
from train.costs.gpus import GPUS, gpu_named, gpu_of_device


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_devices_are_recognised(device: str, name: str) -> None:
    assert gpu_of_device(device) == GPUS[name]


def test_unknown_ones_are_not_guessed() -> None:
    assert gpu_of_device("NVIDIA GeForce GTX 1080") is None and gpu_of_device("NVIDIA L400") is None
    assert gpu_named("h100") == GPUS["H100"]
    with pytest.raises(UserError, match="unknown GPU 'H10': did you mean 'H100'"):
        gpu_named("H10")
