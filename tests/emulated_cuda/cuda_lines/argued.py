"""Why no scenario executes some statements that only CUDA devices execute."""

from __future__ import annotations

_PACKAGE = "needs a package that is built for CUDA (flash-attn, transformer-engine); nothing takes its place here"
_OTHER_GPU = "is for a GPU that is not emulated: an older one, an unknown one, or one whose driver fails"

ARGUED: dict[str, str] = {
    "megatron/core/device.py:Device.queue_state": "needs a device that has failed, which ends an emulated process",
    "megatron/core/device.py:Device.peak_tflops": _OTHER_GPU,
    "megatron/core/device.py:select_device": (
        "needs other numbers of devices than the four of the scenarios; the unit tests replace torch.cuda for it"
    ),
    "megatron/core/device.py:_has_device_of_its_own": (
        "needs one device per process; the unit tests replace torch.cuda for it"
    ),
    "megatron/core/kernels/attention_block.py:widest_flash_head": _OTHER_GPU,
    "megatron/core/kernels/attention_choice.py:select_attention_core": _PACKAGE,
    "megatron/core/kernels/attention_choice.py:describe_missing_flash": _PACKAGE,
    "megatron/core/kernels/attention_choice.py:_kernels_of_engine": _PACKAGE,
    "megatron/core/kernels/attention_choice.py:_fits_engine": _PACKAGE,
    "megatron/core/kernels/attention_choice.py:_packages": _PACKAGE,
    "megatron/core/kernels/attention_choice.py:_without_dropout": _PACKAGE,
    "megatron/core/kernels/attention_choice.py:_by_package": _PACKAGE,
    "megatron/core/kernels/dot_product_attention.py:_added": (
        "is for a call without a rule, which kernels before this one take; the unit tests call it"
    ),
    "megatron/core/kernels/transformer_engine.py:": _PACKAGE,
    "megatron/core/kernels/triton_programs/probe.py:": "needs a GPU or a Triton that compiles nothing",
    "megatron/core/kernels/triton_programs/rotary.py:_launch": "is for tensors without elements, which no training has",
    "megatron/core/tensor_parallel/overlap/symmetric_memory.py:": (
        "needs a torch without symmetric memory, devices without peer access, or two nodes"
    ),
    "megatron/training/model_setup.py:describe_rounded_gradients": (
        "needs a torch without products into float32 sums; the emulated one has them"
    ),
    "megatron/training/process/initialize.py:abort_communication": "runs when a rank that hangs is ended",
    "megatron/training/process/initialize.py:initialize_runtime": "needs the driver's library, libnvidia-ml",
}
"""By ``path:function``, or the start of it: the reason."""


def reason(key: str) -> str | None:
    """Return why the statements of a function are not executed, or None."""
    return next((text for start, text in ARGUED.items() if key.startswith(start)), None)
