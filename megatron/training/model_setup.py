"""Build the model chunks of this rank, their data-parallel wrappers, the optimizer, its schedule and the links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from megatron.core.collectives import all_gather_objects, any_rank
from megatron.core.cuda_graph import GraphBackend
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.errors import ConfigurationError
from megatron.core.host_memory import HostCopies
from megatron.core.main_grad import WeightGradQueue
from megatron.core.models.fp8_layers import compute_in_float8, describe_float8
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.model import Model, wrap_model
from megatron.core.ops.attention_backend import describe_missing_flash
from megatron.core.ops.fp8_quantizers import Float8State
from megatron.core.ops.gemm import why_no_wide_products
from megatron.core.ops.transformer_engine import TRANSFORMER_ENGINE, why_no_transformer_engine
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler, ScheduleConfig
from megatron.core.pipeline_parallel.executor import PipelineConnection
from megatron.core.pipeline_parallel.p2p_communication import MessageOrders, create_pipeline_links
from megatron.core.pipeline_parallel.schedules import StagePlace
from megatron.core.pipeline_parallel.stage_layout import StageContents, StageLayout
from megatron.core.precision import dtype_from_name
from megatron.core.tensor_parallel.cpu_offload import ActivationOffload, WeightOffload
from megatron.core.transformer.attention import describe_attention
from megatron.core.transformer.cuda_graphs import GraphedLayers
from megatron.core.transformer.moe.load_balancing import ExpertLoads
from megatron.core.transformer.moe.moe_layer import loads_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.interop.huggingface.families import describe_missing_family
from megatron.training.compiled_regions import compile_regions
from megatron.training.config.run_config import RunConfig
from megatron.training.optimizer_setup import build_optimizer
from megatron.training.process.initialize import Runtime

ModelProvider = Callable[[RunConfig, Runtime, StageContents], Model]
"""Return one model chunk of this rank, initialised, on its device."""


@dataclass(frozen=True, eq=False)
class TrainingParts:
    """Hold what a training step works on.

    ``chunks`` are this rank's model chunks in their order along the pipeline, ``ddp_chunks`` the same wrapped,
    ``connection`` reaches the neighbouring stages (None without a pipeline), and ``weight_grad_queues`` defer the
    chunks' weight gradients where the pipeline schedule splits the backward pass. ``graphs`` run the chunks' layers
    where CUDA graphs are asked for, and ``weights`` are those that leave the device while a step's passes run.
    ``late_grads`` defers those of the output layer, which the last chunk has. ``float8`` is what delayed scaling
    remembers, where there is such. ``expert_loads`` counts what experts are given, where layers have some.
    ``num_replicas_in_loss`` divides the loss of each step (see `num_replicas_in_loss`).
    """

    chunks: tuple[Model, ...]
    ddp_chunks: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    connection: PipelineConnection | None
    weight_grad_queues: tuple[WeightGradQueue | None, ...]
    graphs: tuple[GraphedLayers, ...] = ()
    weights: tuple[WeightOffload, ...] = ()
    late_grads: WeightGradQueue | None = None
    float8: Float8State | None = None
    expert_loads: ExpertLoads | None = None
    num_replicas_in_loss: int = 1


def with_transformer_impl(config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> RunConfig:
    """Return the configuration with the layers that every rank can have, and say why they are not those asked for.

    Collective.
    """
    model = config.model
    if model.transformer_impl != TRANSFORMER_ENGINE:
        return config
    reason = why_no_transformer_engine(model.params_dtype, runtime.device.torch_device)
    if not any_rank(reason is not None, runtime.state.world):
        return config
    reason = reason or "another process of this run cannot import the package"
    log(f"transformer-engine is not used, since {reason}: this project's own layers take its place")
    return replace(config, model=replace(model, transformer_impl="local"))


def build_training_parts(
    config: RunConfig, runtime: Runtime, model_provider: ModelProvider, log: Callable[[str], None]
) -> TrainingParts:
    """Build everything that is trained, and log the parameter count of every model-parallel rank."""
    layout = config.stage_layout
    chunks = tuple(model_provider(config, runtime, contents) for contents in layout.chunks(runtime.state.pp.rank))
    for line in describe_parameter_counts(chunks, runtime):
        log(line)
    device = runtime.device.torch_device
    has_documents = config.data.reset_attention_mask
    log(describe_attention(chunks[0].config, device, config.data.seq_length, has_documents=has_documents))
    # With packed documents the reason was given with the command line's.
    without_flash = describe_missing_flash(
        config.model.attention_backend, config.model.params_dtype, device, has_sinks=config.model.has_sinks
    )
    if without_flash is not None and not has_documents:
        log(without_flash)
    model = chunks[0].config
    without_family = describe_missing_family(model) if config.checkpoint.save and isinstance(model, GPTConfig) else None
    if without_family is not None:
        log(without_family)
    in_loss = num_replicas_in_loss(config, runtime.state.dp_cp.size)
    # Gradients of a loss that is not divided are as many times as large as those of one process.
    sums_gradients = config.training.calculate_per_token_loss or in_loss > 1
    num_averaged = 1 if sums_gradients else runtime.state.dp_cp.size
    float8 = compute_in_float8(chunks, model, device, num_averaged)
    in_float8 = describe_float8(model, device)
    if in_float8 is not None:
        log(in_float8)
    rounded = describe_rounded_gradients(config, device)
    if rounded is not None:
        log(rounded)
    if config.training.compile:
        compile_regions(chunks, config, log)
    ddp_chunks = tuple(
        wrap_model(chunk, config.ddp, runtime.state, calculate_per_token_loss=sums_gradients) for chunk in chunks
    )
    optimizer = build_optimizer(config, runtime, ddp_chunks, log)
    weights: tuple[WeightOffload, ...] = ()
    if config.model.num_offloaded_layers:
        weights = offload_layers(chunks, runtime.device.host_copies(), config.model)
    graphs: tuple[GraphedLayers, ...] = ()
    if config.training.cuda_graph_impl == "local":
        graphs = record_layers(chunks, runtime.device.graph_backend(), config.training.cuda_graph_warmup_steps)
    splits_backward = config.pipeline_schedule == "zero-bubble" or config.model.delay_wgrad_compute
    return TrainingParts(
        chunks=chunks,
        ddp_chunks=ddp_chunks,
        optimizer=optimizer,
        scheduler=OptimizerParamScheduler(optimizer, schedule_of(config)),
        connection=connect_pipeline(config, runtime, layout, chunks[0].config),
        weight_grad_queues=tuple(WeightGradQueue(c.parameters()) if splits_backward else None for c in chunks),
        graphs=graphs,
        weights=weights,
        late_grads=make_late_grads(config, chunks),
        float8=float8,
        expert_loads=loads_of(chunks, config.model, runtime.state),
        num_replicas_in_loss=in_loss,
    )


def describe_rounded_gradients(config: RunConfig, device: torch.device) -> str | None:
    """Return a line that says why gradients are rounded before they are summed although the flags ask for float32."""
    name = config.model.params_dtype
    is_asked = config.ddp.gradient_accumulation_fusion and config.ddp.grad_dtype(name) == "float32" != name
    if not is_asked or device.type != "cuda":
        return None
    reason = why_no_wide_products(dtype_from_name(name), device)
    if reason is None:
        return None
    return (
        f"WARNING: the gradients of {name} weights are rounded to {name} before they are added to their float32 sums: "
        f"this torch does not add such products to float32 ({reason})"
    )


def num_replicas_in_loss(config: RunConfig, num_replicas: int) -> int:
    """Return the number that a step divides its loss by so that a sum over the replicas is the gradients' average.

    A power of two changes no bit of a gradient but its exponent, so the sum is bit by bit the average of undivided
    gradients, and needs neither a pass over them nor NCCL's AVG. It is 1, and gradients are averaged after the backward
    pass, for other numbers, which would round earlier than one process does, and for float16, which has too few
    exponents: the loss scale would adapt to the number of replicas.
    """
    is_exact = num_replicas & (num_replicas - 1) == 0 and config.model.params_dtype != "float16"
    averages_later = config.training.calculate_per_token_loss or config.ddp.ddp_average_in_collective
    return num_replicas if is_exact and not averages_later else 1


def offload_layers(chunks: Sequence[Model], copies: HostCopies, config: TransformerConfig) -> tuple[WeightOffload, ...]:
    """Let the first layers of each chunk leave in the machine's memory what the configuration says.

    Returns what moves their weights, if these are to move.

    Raises:
        ConfigurationError: the model has no transformer layers.
    """
    blocks = [block for chunk in chunks for block in chunk.blocks]
    if not blocks:
        raise ConfigurationError("--cpu-offloading: this model has no transformer layers; leave it out")
    moved: list[WeightOffload] = []
    for block in blocks:
        if config.cpu_offloading_activations:
            block.offload = ActivationOffload(copies, config.num_offloaded_layers)
        if config.cpu_offloading_weights:
            block.weights = WeightOffload(copies, list(block.layers.values())[: config.num_offloaded_layers])
            moved.append(block.weights)
    return tuple(moved)


def record_layers(
    chunks: Sequence[Model], backend: GraphBackend | None, num_warmup_steps: int
) -> tuple[GraphedLayers, ...]:
    """Let the chunks' layers run as graphs after so many steps.

    Raises:
        ConfigurationError: the device has no graphs, or the model no transformer layers.
    """
    if backend is None:
        raise ConfigurationError("--cuda-graph-impl local needs a CUDA device, and this run is on CPU; leave it out")
    blocks = [block for chunk in chunks for block in chunk.blocks]
    if not blocks:
        raise ConfigurationError("--cuda-graph-impl local: this model has no transformer layers; leave it out")
    graphs = tuple(GraphedLayers(backend, num_warmup_steps) for _ in blocks)
    for block, layers in zip(blocks, graphs):
        block.graphs = layers
    return graphs


def connect_pipeline(
    config: RunConfig, runtime: Runtime, layout: StageLayout, model: TransformerConfig
) -> PipelineConnection | None:
    """Make the links to the neighbouring stages; every rank of the pipeline must call."""
    pp = runtime.state.pp
    if pp.size == 1:
        return None
    timeout = timedelta(minutes=config.initialization.distributed_timeout_minutes)
    device = runtime.device.torch_device
    links = create_pipeline_links(pp, wraps_around=layout.num_chunks > 1, timeout=timeout, device=device)
    shape = model.hidden_shape(config.data.seq_length, config.training.micro_batch_size)
    place = StagePlace(pp.size, pp.rank, layout.num_chunks)
    overlaps = config.model.overlap_p2p_communication
    # Where a rank waits for each of its messages, the ranks must meet in them: they do in one order.
    orders = None if links.post_receives_ahead and overlaps else MessageOrders(place)
    dtype = dtype_from_name(model.params_dtype)
    return PipelineConnection(place, links, lambda microbatch: shape, dtype, orders, overlaps)


def make_late_grads(config: RunConfig, chunks: Sequence[Model]) -> WeightGradQueue | None:
    """Return what defers the output layer's weight gradients on the stage that has it, where that is asked for."""
    last = chunks[-1]
    if not config.model.defer_embedding_wgrad_compute or not isinstance(last, GPTModel) or not last.post_process:
        return None
    return WeightGradQueue([last.output_weight])


def schedule_of(config: RunConfig) -> ScheduleConfig:
    """Return the learning-rate and weight-decay schedule of a run in samples."""
    lengths, schedule, optimizer = config.schedule_lengths, config.scheduler, config.optimizer
    weight_decay = optimizer.weight_decay
    return ScheduleConfig(
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        init_lr=schedule.lr_warmup_init,
        lr_warmup_steps=lengths.lr_warmup_steps,
        lr_decay_steps=lengths.lr_decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        wsd_decay_steps=lengths.wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        start_wd=weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        end_wd=weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
        wd_incr_steps=lengths.weight_decay_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
        decoupled_max_lr=optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.decoupled_min_lr,
    )


def describe_parameter_counts(chunks: tuple[Model, ...], runtime: Runtime) -> list[str]:
    """Return one line for every model-parallel rank, in order, padding of the vocabulary included."""
    count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    state = runtime.state
    counts = all_gather_objects((state.pp.rank, state.tp.rank, count), state.model_parallel)
    return [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tp_rank}, {pp_rank}): {rank_count}"
        for pp_rank, tp_rank, rank_count in sorted(counts)
    ]
