"""Checks of what CUDA graphs cannot hold."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig

_REFUSED = "--cuda-graph-impl local:"


def _check_documents(config: RunConfig) -> Iterator[str]:
    if config.training.cuda_graph_impl != "local":
        return
    if config.data.sft and config.data.sft_packing:
        yield f"{_REFUSED} --sft packs other conversations in each micro-batch; leave one out, or add --no-sft-packing"
        return
    for flag, is_given in (
        ("--reset-attention-mask", config.data.reset_attention_mask),
        ("--reset-position-ids", config.data.reset_position_ids),
    ):
        if is_given:
            yield f"{_REFUSED} {flag} changes the work from one micro-batch to the next; leave one of them out"


def _check_dropout(config: RunConfig) -> Iterator[str]:
    model = config.model
    if config.training.cuda_graph_impl != "local" or model.attention_dropout == 0:
        return
    if model.attention_backend not in ("unfused", "local"):
        yield (
            f"{_REFUSED} --attention-dropout {model.attention_dropout} by the kernels of --attention-backend "
            f"{model.attention_backend} takes a seed from the host in each micro-batch; give --attention-dropout 0, or "
            "--attention-backend unfused"
        )


def _check_gradients(config: RunConfig) -> Iterator[str]:
    if config.training.cuda_graph_impl == "local" and config.ddp.shards_gradients:
        yield (
            f"{_REFUSED} with --data-parallel-sharding-strategy {config.ddp.data_parallel_sharding_strategy} gradients "
            "have no memory of their own between micro-batches; use optim"
        )


def _check_logits(config: RunConfig) -> Iterator[str]:
    if config.training.cuda_graph_impl == "local" and config.logging.log_max_attention_logit:
        yield f"{_REFUSED} --log-max-attention-logit computes more in some iterations only; leave one of them out"


CHECKS = (
    Check(("cuda_graph_impl", "log_max_attention_logit"), _check_logits),
    Check(("cuda_graph_impl", "reset_attention_mask", "reset_position_ids", "sft_packing"), _check_documents),
    Check(("cuda_graph_impl", "attention_dropout", "attention_backend"), _check_dropout),
    Check(("cuda_graph_impl", "data_parallel_sharding_strategy"), _check_gradients),
)
