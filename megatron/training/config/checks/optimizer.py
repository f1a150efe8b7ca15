"""Checks of optimizer offload and of the types of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig


def _check_types(config: RunConfig) -> Iterator[str]:
    optimizer, dtype = config.optimizer, config.model.params_dtype
    if optimizer.main_grads_dtype == "bf16" and dtype != "bfloat16":
        yield f"--main-grads-dtype bf16 needs --bf16: the model is {dtype}; give --bf16, or --main-grads-dtype fp32"
    if optimizer.main_params_dtype == "fp16":
        if dtype != "bfloat16":
            yield (
                "--main-params-dtype fp16 keeps what bfloat16 weights lack of float32, and the model is "
                f"{dtype}; give --bf16, or --main-params-dtype fp32"
            )
        elif optimizer.offload_fraction:
            yield (
                "--main-params-dtype fp16 keeps a part of each main parameter in the weights of the device, where the "
                "host has none; give --main-params-dtype fp32, or leave the optimizer's offload out"
            )
    if optimizer.optimizer != "adam":
        for name in ("exp_avg", "exp_avg_sq"):
            value = getattr(optimizer, f"{name}_dtype")
            if value != "fp32":
                flag = f"--{name.replace('_', '-')}-dtype"
                yield f"{flag} {value} is of Adam's state; give --optimizer adam, or {flag} fp32"


def _check_gather(config: RunConfig) -> Iterator[str]:
    if config.ddp.overlap_param_gather_with_optimizer_step and config.optimizer.optimizer_cpu_offload:
        yield (
            "--overlap-param-gather-with-optimizer-step updates in the order of the forward pass, which offloaded "
            "parameters do not have; leave it or the optimizer's offload out"
        )


CHECKS = (
    Check(("overlap_param_gather_with_optimizer_step", "optimizer_cpu_offload"), _check_gather),
    Check(
        (
            *("optimizer", "params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype"),
            *("exp_avg_sq_dtype", "optimizer_cpu_offload", "optimizer_offload_fraction"),
        ),
        _check_types,
    ),
)
