"""Checks of activation recomputation and offloading, and of CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.base import Check
from megatron.config.run_config import RunConfig


def _check_modules(config: RunConfig) -> Iterator[str]:
    model = config.model
    modules = " ".join(model.recompute_modules)
    if model.recompute_modules == ("core_attn",):
        return
    if model.recompute_granularity is None:
        yield f"--recompute-modules {modules} has no effect without --recompute-granularity selective; add it"
    elif model.recompute_granularity == "full":
        yield (
            f"--recompute-modules {modules} and --recompute-granularity full exclude each other: whole layers are "
            "recomputed; leave it out or use --recompute-granularity selective"
        )
    elif "layernorm" in model.recompute_modules:
        others = " ".join(name for name in model.recompute_modules if name != "layernorm") or "core_attn"
        if model.norm_placement == "after":
            yield (
                "--recompute-modules layernorm is of the norms in front of attention and feed-forward, and "
                f"--norm-placement after has none; use --recompute-modules {others}"
            )
        if model.apply_residual_connection_post_layernorm:
            yield (
                "--recompute-modules layernorm computes norms again from a residual stream that goes around them, and "
                f"--apply-residual-connection-post-layernorm leads it through; use --recompute-modules {others}"
            )


def _check_distributed(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.distribute_saved_activations:
        return
    flag = "--distribute-saved-activations"
    if model.recompute_granularity != "full":
        yield f"{flag} is of the inputs that full recompute keeps; add --recompute-granularity full"
    if model.sequence_parallel:
        yield f"{flag} and --sequence-parallel exclude each other: each rank keeps its own part already; keep one"
    elif model.tensor_model_parallel_size == 1:
        yield f"{flag} has no effect with --tensor-model-parallel-size 1; leave it out"
    sizes = model.parallel_sizes
    if sizes.tp <= 0 or sizes.cp <= 0:
        return
    shape = model.hidden_shape(config.data.seq_length, config.training.micro_batch_size)
    if not model.sequence_parallel and (shape[0] * shape[1] * shape[2]) % sizes.tp:
        yield (
            f"{flag} divides hidden states of {shape[0]} x {shape[1]} x {shape[2]} by "
            f"--tensor-model-parallel-size {sizes.tp}; change --hidden-size or leave it out"
        )


def _check_offload(config: RunConfig) -> Iterator[str]:
    model = config.model
    layers = model.cpu_offloading_num_layers
    values = f"values from 1 to {model.num_layers} work"
    if not model.cpu_offloading:
        if layers:
            yield f"--cpu-offloading-num-layers {layers} has no effect without --cpu-offloading; add it"
    elif not layers:
        yield f"--cpu-offloading needs --cpu-offloading-num-layers; {values}"
    elif layers > model.num_layers:
        yield f"--cpu-offloading-num-layers {layers} is greater than --num-layers {model.num_layers}; {values}"


def _check_weights(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.cpu_offloading:
        if not model.cpu_offloading_activations:
            yield "--no-cpu-offloading-activations has no effect without --cpu-offloading; leave it out"
        return
    if not model.cpu_offloading_activations and not model.cpu_offloading_weights:
        yield (
            "--cpu-offloading with --no-cpu-offloading-activations moves nothing; add --cpu-offloading-weights or "
            "leave one of them out"
        )
    if model.cpu_offloading_weights and config.ddp.shards_optimizer:
        yield (
            "--cpu-offloading-weights: with --use-distributed-optimizer the weights of all layers lie in one buffer, "
            "which is gathered on the device; leave one of them out"
        )


def _check_graphs(config: RunConfig) -> Iterator[str]:
    if config.training.cuda_graph_impl != "local":
        return
    refused = "--cuda-graph-impl local:"
    if config.model.cpu_offloading:
        yield f"{refused} --cpu-offloading moves memory that graphs need where it is; leave one of them out"
    if config.model.distribute_saved_activations:
        yield f"{refused} --distribute-saved-activations is not recorded; leave one of them out"


ACTIVATION_CHECKS = (
    Check(
        (
            *("recompute_granularity", "recompute_modules", "norm_placement"),
            "apply_residual_connection_post_layernorm",
        ),
        _check_modules,
    ),
    Check(
        (
            *("distribute_saved_activations", "recompute_granularity", "sequence_parallel", "seq_length"),
            *("tensor_model_parallel_size", "context_parallel_size", "micro_batch_size", "hidden_size"),
        ),
        _check_distributed,
    ),
    Check(("num_layers", "cpu_offloading", "cpu_offloading_num_layers"), _check_offload),
    Check(
        (
            *("cpu_offloading", "cpu_offloading_activations", "cpu_offloading_weights"),
            *("use_distributed_optimizer", "data_parallel_sharding_strategy"),
        ),
        _check_weights,
    ),
    Check(("cuda_graph_impl", "cpu_offloading", "distribute_saved_activations"), _check_graphs),
)


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


CUDA_GRAPH_CHECKS = (
    Check(("cuda_graph_impl", "log_max_attention_logit"), _check_logits),
    Check(("cuda_graph_impl", "reset_attention_mask", "reset_position_ids", "sft_packing"), _check_documents),
    Check(("cuda_graph_impl", "attention_dropout", "attention_backend"), _check_dropout),
    Check(("cuda_graph_impl", "data_parallel_sharding_strategy"), _check_gradients),
)
