"""Checks of declared bounds and exclusions, of the parallel layout, CUDA graphs and activation memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from megatron.config import RunConfig
from megatron.core.context_parallel import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.errors import ConfigurationError, choices, divisors
from megatron.core.models.gpt import GPTConfig
from megatron.core.parallel_config import MODEL_SIZE_NAMES
from megatron.core.pipeline_parallel import default_schedule, layout_problems, schedule_problems


@dataclasses.dataclass(frozen=True)
class Check:
    """Pure function that yields problems, one line each, and the fields that it reads.

    A check is skipped if one of its fields has no usable value, whose problem is already reported.
    """

    reads: tuple[str, ...]
    find: Callable[[RunConfig], Iterable[str]]


ATTENTION_SHAPE = ("global_kv_channels", "global_num_query_groups", "num_query_groups", "kv_channels")


def attention_shapes(model: GPTConfig) -> Iterator[tuple[GPTConfig, str, str]]:
    """Yield each shape of attention, with the flags of its head width and of its number of query groups.

    Layers without a window count, whether or not the model has any.
    """
    yield model.of_windowed_layers, "--kv-channels", "--num-query-groups"
    if model.global_kv_channels is not None or model.global_num_query_groups is not None:
        width = "--kv-channels" if model.global_kv_channels is None else "--global-kv-channels"
        groups = "--num-query-groups" if model.global_num_query_groups is None else "--global-num-query-groups"
        yield model.of_global_layers, width, groups


def query_groups(model: GPTConfig) -> dict[str, int]:
    """Return the numbers of query groups of the layers, by flag."""
    return {flag: shape.num_query_groups for shape, _, flag in attention_shapes(model)}


_MAX_SEED = 2**32 - 1


def _check_bounds(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each value outside its bounds."""
    for spec, value in config.flags("bounds"):
        bounds = spec.options.bounds
        if bounds is not None and value is not None and not bounds.hold(value):
            yield f"{spec.typed(value)}: a value {bounds.words} is expected"


def _check_exclusions(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each group of mutually exclusive fields that are given together."""
    reported: set[str] = set()
    for spec, value in config.flags("excludes"):
        if value == spec.default or spec.name in reported:
            continue
        others = [each for each in map(config.flag, spec.options.excludes) if each is not None]
        given = [(spec, value), *(each for each in others if each[1] != each[0].default)]
        if len(given) > 1:
            reported.update(each.name for each, _ in given)
            yield f"{' and '.join(each.typed(number) for each, number in given)} exclude each other; omit one of them"


def _check_needs(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each given field without the field that it requires, or any of several fields."""
    for spec, value in config.flags("needs"):
        if value == spec.default:
            continue
        names = spec.options.needs or ()
        flags = map(config.flag, (names,) if isinstance(names, str) else names)
        found = [each for each in flags if each is not None]
        if found and all(each == needed.default for needed, each in found):
            needed = found[0][0]
            what = " or ".join(each.flags[0] if each.is_bool else each.typed(each.metavar) for each, _ in found)
            remedy = "add it, or omit the first" if needed.is_bool else "add it" if len(found) == 1 else "add one"
            yield f"{spec.typed(value)} has no effect without {what}; {remedy}"


def _check_seed(config: RunConfig) -> Iterator[str]:
    seed = config.initialization.seed
    if seed > _MAX_SEED:
        yield f"--seed {seed}: NumPy takes seeds up to {_MAX_SEED}"


def _check_replication(config: RunConfig) -> Iterator[str]:
    restart, world_size = config.restart, config.world_size
    jump = restart.replication_jump or 1
    if restart.replication and jump % world_size == 0:
        given = "" if restart.replication_jump is None else f" --replication-jump {jump}"
        remedy = f"use a --replication-jump from 1 to {world_size - 1}" if world_size > 1 else "omit it"
        yield f"--replication{given}: with world size {world_size} each rank would send its copy to itself; {remedy}"


FIELD_CHECKS = (
    Check((), _check_bounds),
    Check((), _check_exclusions),
    Check((), _check_needs),
    Check(("seed",), _check_seed),
    Check(("replication_jump",), _check_replication),
)


def has_whole_copies(config: RunConfig) -> bool:
    """Return whether the world size is a multiple of the model-parallel size, so that a data-parallel size exists."""
    return not config.parallel_sizes.problems(config.world_size)


def _check_world_size(config: RunConfig) -> Iterator[str]:
    if config.model.parallel_sizes.world_size > 0:
        yield from config.parallel_sizes.problems(config.world_size, config.model.moe.num_experts or 0)


def _check_heads_of_tensor_ranks(config: RunConfig) -> Iterator[str]:
    heads, tensor = config.model.num_attention_heads, config.model.tensor_model_parallel_size
    if tensor > 0 and heads > 0 and heads % tensor != 0:
        yield (
            f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tensor}; "
            f"tensor-parallel sizes that work: {divisors(heads, heads)}"
        )


def _check_key_value_heads(config: RunConfig) -> Iterator[str]:
    tensor = config.model.tensor_model_parallel_size
    for flag, groups in query_groups(config.model).items():
        if groups <= 0 or tensor <= 0 or groups == config.model.num_attention_heads:
            continue
        if groups % tensor != 0 and tensor % groups != 0:
            yield (
                f"{flag} {groups} and --tensor-model-parallel-size {tensor}: "
                f"one must be a multiple of the other; "
                f"tensor-parallel sizes that work: {divisors(groups, groups)} and multiples of {groups}"
            )


def _check_feed_forward(config: RunConfig) -> Iterator[str]:
    width, tensor = config.model.ffn_hidden_size, config.model.tensor_model_parallel_size
    if tensor > 0 and width % tensor != 0:
        yield (
            f"--ffn-hidden-size {width} is not divisible by --tensor-model-parallel-size {tensor}; "
            f"tensor-parallel sizes that work: {divisors(width, 64)}"
        )


def _check_sequence_parallel(config: RunConfig) -> Iterator[str]:
    length, tensor = config.data.seq_length, config.model.tensor_model_parallel_size
    if config.model.context_parallel_size > 1:  # A separate check covers both.
        return
    if config.model.sequence_parallel and tensor > 0 and length % tensor != 0:
        yield (
            f"--seq-length {length} is not divisible by --tensor-model-parallel-size {tensor}, which "
            f"--sequence-parallel needs; the next length that works: {-(-length // tensor) * tensor}"
        )


def _instance_problems(config: RunConfig) -> Iterator[str]:
    number, sizes = config.ddp.num_distributed_optimizer_instances, config.parallel_sizes
    given = f"--num-distributed-optimizer-instances {number}"
    if number <= 1 or sizes.problems(config.world_size):
        return
    if not config.ddp.shards_optimizer and sizes.num_replicas > 1:
        yield (
            f"{given} replicates the sharded optimizer, but the optimizer is not sharded; add "
            "--use-distributed-optimizer, or omit it"
        )
    elif sizes.num_replicas == number:
        yield (
            f"{given}: with as many instances as ranks with the same weights ({number}), nothing would be sharded; "
            "lower it"
        )
    for name, replicas in (("same weights", sizes.num_replicas), ("same experts", sizes.num_expert_replicas)):
        if replicas % number and (name == "same weights" or config.model.moe.num_experts is not None):
            able = divisors(replicas, max(1, replicas // 2))
            yield f"{given} does not divide the {replicas} ranks with the {name}; use {able}"


def _check_sharding(config: RunConfig) -> Iterator[str]:
    """Reject options that FSDP (sharded weights) does not support."""
    model, ddp = config.model, config.ddp
    strategy = f"--data-parallel-sharding-strategy {ddp.data_parallel_sharding_strategy}"
    if ddp.use_torch_fsdp2 and not ddp.shards_weights and config.parallel_sizes.num_replicas > 1:
        yield f"--use-torch-fsdp2 shards weights, but {strategy} does not; omit one of them"
    yield from _instance_problems(config)
    if not ddp.shards_weights:
        return
    instead = "omit it, or pass --data-parallel-sharding-strategy optim_grads"
    if model.lora_rank:
        yield f"--lora-rank {model.lora_rank} with {strategy}: frozen weights would not be sharded; {instead}"
    if model.fp8.fp8_param_gather:
        yield f"--fp8-param-gather with {strategy}: weights are gathered in the model's own precision; {instead}"
    if ddp.overlap_param_gather_with_optimizer_step:
        yield f"--overlap-param-gather-with-optimizer-step with {strategy}: an update gathers no weights; {instead}"


DATA_PARALLEL_CHECKS = (
    Check(
        (
            *("data_parallel_sharding_strategy", "use_torch_fsdp2", "use_megatron_fsdp", "lora_rank"),
            *("num_distributed_optimizer_instances", "use_distributed_optimizer", "num_experts"),
            *("fp8_param_gather", "overlap_param_gather_with_optimizer_step", *MODEL_SIZE_NAMES),
        ),
        _check_sharding,
    ),
)
"""Checks of training only, not of generation and conversion."""
LAYOUT_CHECKS = (
    Check(MODEL_SIZE_NAMES, _check_world_size),
    Check(("num_attention_heads", "tensor_model_parallel_size"), _check_heads_of_tensor_ranks),
    Check(("num_attention_heads", "tensor_model_parallel_size", *ATTENTION_SHAPE), _check_key_value_heads),
    Check(("hidden_size", "ffn_hidden_size", "tensor_model_parallel_size"), _check_feed_forward),
    Check(("seq_length", "tensor_model_parallel_size", "context_parallel_size"), _check_sequence_parallel),
)


def _check_layout(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_layers > 0 and model.pipeline_model_parallel_size > 0:
        yield from layout_problems(model, model.num_layers, model.pipeline_model_parallel_layout)


def _check_virtual_stages(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.pipeline_model_parallel_size != 1:
        return
    given = {
        "--num-layers-per-virtual-pipeline-stage": model.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": model.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": model.pipeline_model_parallel_layout,
    }
    for name, value in given.items():
        if value is not None:
            yield (
                f"{name} {value} divides a pipeline, but --pipeline-model-parallel-size is 1; omit it, or use "
                "--pipeline-model-parallel-size 2 or more"
            )


def _check_schedule(config: RunConfig) -> Iterator[str]:
    model, training = config.model, config.training
    pp, per_step = model.pipeline_model_parallel_size, training.micro_batch_size
    if pp <= 0 or model.num_layers <= 0 or not has_whole_copies(config):
        return
    per_step *= config.data_parallel_size
    if per_step <= 0 or training.global_batch_size <= 0 or training.global_batch_size % per_step:
        return
    try:
        num_chunks = config.stage_layout.num_chunks
    except ConfigurationError:
        return  # The check of the layout reports it.
    group_size = model.microbatch_group_size_per_virtual_pipeline_stage
    if pp == num_chunks == 1 and model.pipeline_schedule is None and group_size is None:
        return  # A single stage runs its micro-batches sequentially.
    name = model.pipeline_schedule or default_schedule(pp, num_chunks)
    yield from schedule_problems(name, pp, training.global_batch_size // per_step, num_chunks, group_size)


LAYOUT_FIELDS = (
    "num_layers",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)
"""Fields that determine which layers are on which stage."""

PIPELINE_CHECKS = (
    Check(LAYOUT_FIELDS, _check_layout),
    Check(LAYOUT_FIELDS, _check_virtual_stages),
    Check(
        (
            *LAYOUT_FIELDS,
            "pipeline_schedule",
            "microbatch_group_size_per_virtual_pipeline_stage",
            "micro_batch_size",
            "global_batch_size",
        ),
        _check_schedule,
    ),
)


_LEVELS = "a2a+p2p"
_EXCHANGES = ("p2p", "all_gather", "a2a", _LEVELS)
_LARGEST_PROPOSED_SIZE = 64


def _check_sequence(config: RunConfig) -> Iterator[str]:
    length, model = config.data.seq_length, config.model
    context = model.context_parallel_size
    tensor = model.tensor_model_parallel_size if model.sequence_parallel else 1
    if length <= 0 or tensor <= 0 or context <= 1 or length % _unit(context, tensor) == 0:
        return
    unit = _unit(context, tensor)
    reason = f"2 x {context} chunks" + (f", and each chunk into tensor({tensor}) parts" if tensor > 1 else "")
    limit = min(length, _LARGEST_PROPOSED_SIZE)
    sizes = [size for size in range(1, limit + 1) if length % _unit(size, tensor) == 0]
    yield (
        f"--seq-length {length} is not divisible by {unit}: --context-parallel-size {context} splits it into {reason}; "
        f"the next length that works: {-(-length // unit) * unit}; context-parallel sizes that work: {choices(sizes)}"
    )


def _unit(context: int, tensor: int) -> int:
    """Return the number that must divide the sequence length."""
    return math.lcm(2 * context if context > 1 else 1, context * tensor)


def _check_exchanges(config: RunConfig) -> Iterator[str]:
    given, layers = config.model.cp_comm_type, config.model.num_layers
    for name in dict.fromkeys(given):
        if name not in _EXCHANGES:
            yield f"--cp-comm-type {name}: values that work: {', '.join(_EXCHANGES)}"
    if len(given) not in (1, layers):
        yield (
            f"--cp-comm-type has {len(given)} values; pass one for all layers, or one per layer (--num-layers {layers})"
        )


def _check_levels(config: RunConfig) -> Iterator[str]:
    model = config.model
    context, sizes = model.context_parallel_size, model.hierarchical_context_parallel_sizes
    if context <= 1 or _LEVELS not in model.cp_comm_type or _has_levels(config):
        return
    flag = "--hierarchical-context-parallel-sizes"
    pairs = choices(f"{inner} {context // inner}" for inner in range(1, context + 1) if context % inner == 0)
    said = f"{flag} {' '.join(map(str, sizes))} are not two sizes with this product" if sizes else f"{flag} is missing"
    yield (
        f"--cp-comm-type {_LEVELS} splits --context-parallel-size {context} into two levels, but {said}; use one of: "
        f"{pairs}"
    )


def _has_levels(config: RunConfig) -> bool:
    sizes = config.model.hierarchical_context_parallel_sizes
    return len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == config.model.context_parallel_size


def _check_heads_of_context_ranks(config: RunConfig) -> Iterator[str]:
    model = config.model
    context = model.context_parallel_size
    try:
        exchanges = model.attention_exchanges
    except ValueError:
        return  # The check of the pattern reports it.
    if context > 1 and "a2a" in exchanges:
        yield from _head_problems(config, context, "a2a", "--context-parallel-size")
    if context > 1 and _LEVELS in exchanges and _has_levels(config):
        inner = model.hierarchical_context_parallel_sizes[0]
        yield from _head_problems(config, inner, _LEVELS, "the first of --hierarchical-context-parallel-sizes")


def _head_problems(config: RunConfig, context: int, exchange: str, sharers: str) -> Iterator[str]:
    model = config.model
    tensor = model.tensor_model_parallel_size
    heads = model.num_attention_heads
    for groups in query_groups(model).values():
        if tensor <= 0 or groups <= 0 or heads <= 0 or heads % tensor or heads % groups:
            continue
        local_heads, local_groups = heads // tensor, key_value_heads_of_rank(groups, tensor)
        if copies_of_key_value_heads(local_heads, local_groups, context) is not None:
            continue
        sizes = [
            each for each in range(1, local_heads + 1) if copies_of_key_value_heads(local_heads, local_groups, each)
        ]
        yield (
            f"--cp-comm-type {exchange} cannot divide the {local_heads} heads of a tensor-parallel rank, in "
            f"{local_groups} query groups, among {sharers} {context} ranks; context-parallel sizes that work: "
            f"{choices(sizes)}; or use --cp-comm-type p2p or all_gather"
        )


CONTEXT_PARALLEL_CHECKS = (
    Check(("seq_length", "context_parallel_size", "tensor_model_parallel_size"), _check_sequence),
    Check(("cp_comm_type", "num_layers"), _check_exchanges),
    Check(("cp_comm_type", "context_parallel_size", "hierarchical_context_parallel_sizes"), _check_levels),
    Check(
        (
            "cp_comm_type",
            "hierarchical_context_parallel_sizes",
            "context_parallel_size",
            "tensor_model_parallel_size",
            "num_attention_heads",
            *ATTENTION_SHAPE,
            "num_layers",
            "experimental_attention_variant",
            "linear_attention_freq",
            "hybrid_override_pattern",
        ),
        _check_heads_of_context_ranks,
    ),
)


def _check_modules(config: RunConfig) -> Iterator[str]:
    model = config.model
    modules = " ".join(model.recompute_modules)
    if model.recompute_modules == ("core_attn",):
        return
    if model.recompute_granularity is None:
        yield f"--recompute-modules {modules} has no effect without --recompute-granularity selective; add this flag"
    elif model.recompute_granularity == "full":
        yield (
            f"--recompute-modules {modules} and --recompute-granularity full exclude each other: whole layers are "
            "recomputed; omit it or use --recompute-granularity selective"
        )
    elif "layernorm" in model.recompute_modules:
        others = " ".join(name for name in model.recompute_modules if name != "layernorm") or "core_attn"
        if model.norm_placement == "post":
            yield (
                "--recompute-modules layernorm requires pre-norm (--norm-placement pre or sandwich), not post; use "
                f"--recompute-modules {others}"
            )
        if model.apply_residual_connection_post_layernorm:
            yield (
                "--recompute-modules layernorm requires pre-norm residuals and does not support "
                f"--apply-residual-connection-post-layernorm; use --recompute-modules {others}"
            )


def _check_distributed(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.distribute_saved_activations:
        return
    flag = "--distribute-saved-activations"
    if model.recompute_granularity != "full":
        yield f"{flag} distributes the inputs that full recomputation saves; add --recompute-granularity full"
    if model.sequence_parallel:
        yield (
            f"{flag} and --sequence-parallel exclude each other: with --sequence-parallel each rank already saves "
            "only its own part; omit one of them"
        )
    elif model.tensor_model_parallel_size == 1:
        yield f"{flag} has no effect with --tensor-model-parallel-size 1; omit it"
    sizes = model.parallel_sizes
    if sizes.tp <= 0 or sizes.cp <= 0:
        return
    shape = model.hidden_shape(config.data.seq_length, config.training.micro_batch_size)
    if not model.sequence_parallel and (shape[0] * shape[1] * shape[2]) % sizes.tp:
        yield (
            f"{flag}: hidden states of {shape[0]} x {shape[1]} x {shape[2]} are not divisible by "
            f"--tensor-model-parallel-size {sizes.tp}; change --hidden-size, or omit it"
        )


def _check_offload(config: RunConfig) -> Iterator[str]:
    model = config.model
    layers = model.cpu_offloading_num_layers
    values = f"values from 1 to {model.num_layers} work"
    if not model.cpu_offloading:
        if layers:
            yield f"--cpu-offloading-num-layers {layers} has no effect without --cpu-offloading; add --cpu-offloading"
    elif not layers:
        yield f"--cpu-offloading needs --cpu-offloading-num-layers; {values}"
    elif layers > model.num_layers:
        yield f"--cpu-offloading-num-layers {layers} is greater than --num-layers {model.num_layers}; {values}"


def _check_weights(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.cpu_offloading:
        if not model.cpu_offloading_activations:
            yield "--no-cpu-offloading-activations has no effect without --cpu-offloading; omit it"
        return
    if not model.cpu_offloading_activations and not model.cpu_offloading_weights:
        yield (
            "--cpu-offloading with --no-cpu-offloading-activations offloads nothing; add --cpu-offloading-weights, or "
            "omit one of them"
        )
    if model.cpu_offloading_weights and config.ddp.shards_optimizer:
        yield (
            "--cpu-offloading-weights: with --use-distributed-optimizer the weights of all layers are in one buffer, "
            "which is gathered on the device; omit one of them"
        )


def _check_graphs(config: RunConfig) -> Iterator[str]:
    if config.training.cuda_graph_impl != "local":
        return
    refused = "--cuda-graph-impl local:"
    if config.model.cpu_offloading:
        yield f"{refused} CUDA graphs do not support --cpu-offloading; omit one of them"
    if config.model.distribute_saved_activations:
        yield f"{refused} CUDA graphs do not support --distribute-saved-activations; omit one of them"


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
        yield (
            f"{_REFUSED} --sft packs different conversations in each micro-batch; omit one of them, or add "
            "--no-sft-packing"
        )
        return
    for flag, is_given in (
        ("--reset-attention-mask", config.data.reset_attention_mask),
        ("--reset-position-ids", config.data.reset_position_ids),
    ):
        if is_given:
            yield f"{_REFUSED} {flag} changes the work from one micro-batch to the next; omit one of them"


def _check_dropout(config: RunConfig) -> Iterator[str]:
    model = config.model
    if config.training.cuda_graph_impl != "local" or model.attention_dropout == 0:
        return
    if model.attention_backend not in ("unfused", "local"):
        yield (
            f"{_REFUSED} CUDA graphs do not support fused attention dropout (--attention-dropout "
            f"{model.attention_dropout} with --attention-backend {model.attention_backend}); set --attention-dropout 0 "
            "or --attention-backend unfused"
        )


def _check_gradients(config: RunConfig) -> Iterator[str]:
    if config.training.cuda_graph_impl == "local" and config.ddp.shards_gradients:
        yield (
            f"{_REFUSED} CUDA graphs do not support --data-parallel-sharding-strategy "
            f"{config.ddp.data_parallel_sharding_strategy}; use optim"
        )


def _check_chunked_logits(config: RunConfig) -> Iterator[str]:
    if config.training.cuda_graph_impl == "local" and config.logging.log_max_attention_logit:
        yield f"{_REFUSED} CUDA graphs do not support --log-max-attention-logit; omit one of them"
    if config.training.cuda_graph_impl == "local" and config.model.qk_clip:
        yield f"{_REFUSED} CUDA graphs do not support --qk-clip; omit one of them"


def _check_loss(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not config.training.loss_cuda_graph:
        return
    if config.training.cuda_graph_impl != "local":
        yield "--loss-cuda-graph extends CUDA graphs of layers; add --cuda-graph-impl local"
    if model.z_loss_coeff:
        yield (
            f"--loss-cuda-graph: a CUDA graph returns one loss, not also --z-loss-coeff {model.z_loss_coeff}; omit one "
            "of them"
        )
    if model.loss != "cross_entropy":
        yield (
            f"--loss-cuda-graph captures the cross-entropy, not --loss {model.loss}, which a script registered; omit "
            "one of them"
        )


CUDA_GRAPH_CHECKS = (
    Check(("loss_cuda_graph", "cuda_graph_impl", "z_loss_coeff", "loss"), _check_loss),
    Check(("cuda_graph_impl", "log_max_attention_logit", "qk_clip"), _check_chunked_logits),
    Check(("cuda_graph_impl", "reset_attention_mask", "reset_position_ids", "sft_packing"), _check_documents),
    Check(("cuda_graph_impl", "attention_dropout", "attention_backend"), _check_dropout),
    Check(("cuda_graph_impl", "data_parallel_sharding_strategy"), _check_gradients),
)
