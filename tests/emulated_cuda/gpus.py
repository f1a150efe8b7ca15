"""Properties of the GPU types that can be emulated, from the vendor's data sheets. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceProperties:
    """Describe a device, with the names of ``torch.cuda.get_device_properties``."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int = 48 * 1024
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    clock_rate: int = 1_980_000
    memory_clock_rate: int = 2_619_000
    memory_bus_width: int = 5120
    is_multi_gpu_board: int = 0
    is_integrated: int = 0
    gcnArchName: str = field(default="")
    uuid: str = "00000000-0000-0000-0000-000000000000"
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0


_KIB, _MIB = 2**10, 2**20
GPUS = {
    "a100": DeviceProperties("NVIDIA A100-SXM4-80GB", 8, 0, 81_920 * _MIB, 108, 40 * _MIB, 163 * _KIB, 164 * _KIB),
    "h100": DeviceProperties("NVIDIA H100 80GB HBM3", 9, 0, 81_559 * _MIB, 132, 50 * _MIB, 227 * _KIB, 228 * _KIB),
    "h200": DeviceProperties("NVIDIA H200", 9, 0, 143_771 * _MIB, 132, 60 * _MIB, 227 * _KIB, 228 * _KIB),
    "b200": DeviceProperties("NVIDIA B200", 10, 0, 183_359 * _MIB, 148, 126 * _MIB, 227 * _KIB, 228 * _KIB),
    # The memory of the data sheet, 288 GB; what the driver keeps of it is not known here. All else as on the B200.
    "b300": DeviceProperties("NVIDIA B300", 10, 3, 288 * 10**9, 148, 126 * _MIB, 227 * _KIB, 228 * _KIB),
}
