"""Checks of multi-token prediction: what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checks.check import Check, divisors
from megatron.training.config.run_config import RunConfig


def _check_shape(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.data.seq_length
    if model.mtp_num_layers is None or model.mtp_num_layers < 1:
        return
    given = f"--mtp-num-layers {model.mtp_num_layers}"
    if model.mtp_num_layers >= length > 1:
        yield f"{given} predicts tokens beyond the end of --seq-length {length}; values from 1 to {length - 1} work"
    if model.position_embedding_type == "learned_absolute":
        yield (
            f"{given} embeds tokens without learned positions; use --position-embedding-type rope or "
            "--no-position-embedding"
        )
    tensor = model.tensor_model_parallel_size
    if tensor > 0 and model.hidden_size % tensor:
        yield (
            f"{given}: --hidden-size {model.hidden_size} is not divisible by --tensor-model-parallel-size {tensor}; "
            f"sizes that work: {divisors(model.hidden_size, 64)}"
        )


def _check_beside(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.mtp_num_layers is None:
        return
    given = f"--mtp-num-layers {model.mtp_num_layers}:"
    if model.lora_rank:
        yield f"{given} low-rank adapters beside it are not built; leave --lora-rank out, or --mtp-num-layers"
    if config.training.cuda_graph_impl == "local":
        yield f"{given} its layers are not recorded by --cuda-graph-impl local; use --cuda-graph-impl none"


CHECKS = (
    Check(
        ("mtp_num_layers", "seq_length", "position_embedding_type", "hidden_size", "tensor_model_parallel_size"),
        _check_shape,
    ),
    Check(("mtp_num_layers", "lora_rank", "cuda_graph_impl"), _check_beside),
)
