"""Why no scenario executes some statements that only CUDA devices execute."""

from __future__ import annotations

_OTHER_GPU = "runs on a GPU that is not emulated: an older or an unknown one"

ARGUED: dict[str, str] = {
    "megatron/core/device.py:Device.queue_state": (
        "runs when CUDA has failed. An emulated process ends at its first report; a unit test replaces the stream"
    ),
    "megatron/core/device.py:Device.peak_tflops": _OTHER_GPU,
    "megatron/core/device.py:select_device": (
        "runs if a process sees one device. The scenarios have four; the unit tests replace torch.cuda"
    ),
    "megatron/core/device.py:_has_device_of_its_own": (
        "runs if a process sees one device. The scenarios have four; the unit tests replace torch.cuda"
    ),
    "megatron/core/ops/attention_block.py:widest_flash_head": _OTHER_GPU,
    "megatron/core/ops/attention_backend.py:_kernels_of_engine": (
        "runs on Blackwell with --deterministic-mode, and before Ampere. The scenarios emulate an H100; the unit tests "
        "replace the compute capability"
    ),
    "megatron/core/ops/dot_product_attention.py:_added": (
        "runs for attention without any mask, which no model of the project has; the unit tests call it"
    ),
    "megatron/core/ops/transformer_engine.py:load_transformer_engine": (
        "warns of a broken installation of transformer-engine; the unit tests break a stand-in"
    ),
    "megatron/core/ops/triton/probe.py:": "runs if Triton cannot compile a program; its interpreter can",
    "megatron/core/ops/triton/query_key_value.py:_launch": "is for tensors without elements, which no training has",
    "megatron/core/tensor_parallel/symmetric_memory.py:": (
        "runs with a torch without symmetric memory, with devices without peer access, and on two nodes"
    ),
    "megatron/training/model_setup.py:describe_rounded_gradients": (
        "runs with a torch that adds no 16-bit matmul to a float32 sum; the emulated one does"
    ),
    "megatron/training/initialize.py:initialize_runtime": (
        "needs the driver's library, libnvidia-ml; the unit tests replace what reads it"
    ),
}
"""By ``path:function``, or the start of it: the reason."""


def reason(key: str) -> str | None:
    """Return why the statements of a function are not executed, or None."""
    return next((text for start, text in ARGUED.items() if key.startswith(start)), None)
