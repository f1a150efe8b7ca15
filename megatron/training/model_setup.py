"""Build the model chunks of this rank, their data-parallel wrappers, and the optimizer with its schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from megatron.checkpoint.formats.huggingface import describe_missing_family
from megatron.config import RunConfig
from megatron.core.collectives import all_gather_objects, any_rank
from megatron.core.config_base import with_fields
from megatron.core.cuda_graph import GraphBackend
from megatron.core.device import Device
from megatron.core.distributed import DistributedDataParallel
from megatron.core.errors import ConfigurationError
from megatron.core.host_memory import HostCopies
from megatron.core.main_grad import WeightGradQueue
from megatron.core.models import Model, compute_in_float8, describe_float8, weight_quantizers, wrap_model
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.ops import (
    TRANSFORMER_ENGINE,
    Float8State,
    Fp8Quantizers,
    describe_missing_flash,
    triton_works,
    why_no_transformer_engine,
    why_no_wide_products,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    ParamRates,
    ScheduleConfig,
    examine_rule,
    host_state_bytes,
    is_orthogonalized,
    load_fused_adam,
    make_optimizer,
    state_bytes,
)
from megatron.core.parallel_state import ExpertGroups, ParallelState, all_gather_from_world
from megatron.core.pipeline_parallel import (
    MessageOrders,
    PipelineConnection,
    StageContents,
    StageLayout,
    StagePlace,
    create_pipeline_links,
)
from megatron.core.precision import dtype_from_name
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel import ActivationOffload, WeightOffload
from megatron.core.transformer import DecoderConfig, GraphedLayers, QueryKeyClip, describe_attention
from megatron.core.transformer.moe import ExpertLoads, check_deepep, loads_of, why_no_deepep
from megatron.training.compiled_regions import compile_regions
from megatron.training.initialize import Runtime
from megatron.training.preflight import check_host_memory
from megatron.training.theoretical_memory_usage import activation_bytes, model_size

_GIB = 2**30


def build_optimizer(
    config: RunConfig,
    runtime: Runtime,
    ddp_chunks: Sequence[DistributedDataParallel],
    log: Callable[[str], None],
) -> MegatronOptimizer:
    """Build the optimizer, and log what is offloaded, if anything; collective.

    Raises:
        ConfigurationError: the host has too little memory for the offload, a pattern of --param-group-overrides matches
            no parameter, Muon has no matrix to update, checkpoints would not contain all state of the update rule, or a
            CUDA graph cannot make the update.
    """
    optimizer = config.optimizer
    _check_saved(config)
    _check_buffers(config, ddp_chunks)
    if optimizer.offload_fraction:
        num_elements = sum(shard.end - shard.start for chunk in ddp_chunks for shard in chunk.shards)
        optimizer, why = _with_policy(config, runtime, num_elements)
        num_bytes = host_state_bytes(optimizer, num_elements)
        if config.optimizer.optimizer_offload_policy == "auto":
            # For the static policy, memory was checked before the process groups were created.
            _check_host_memory(dataclasses.replace(config, optimizer=optimizer), runtime)
        log(
            f"optimizer offload: {optimizer.offload_fraction:.0%} of the main parameters and the optimizer's state, "
            f"{num_bytes / _GIB:.2f} GiB on this rank, in host memory ({why})"
        )
    trained = [p for chunk in ddp_chunks for p in chunk.parameters() if p.requires_grad]
    ParamRates(optimizer).check_patterns(trained, runtime.state.world)
    has_matrices = any(is_orthogonalized(spec_of(parameter)) for parameter in trained)
    if optimizer.optimizer == "muon" and not any_rank(has_matrices, runtime.state.world):
        raise ConfigurationError(
            "--optimizer muon updates matrices between the embeddings and the output layer, but this model trains "
            "none; use --optimizer adam"
        )
    captures = optimizer.optimizer_cuda_graph
    backend = runtime.device.graph_backend() if captures else None
    if captures and backend is None:
        raise ConfigurationError("--optimizer-cuda-graph needs a CUDA device, and this run is on CPU; omit it")
    # apex's Adam passes numbers from the host.
    fused_adam = load_fused_adam() if runtime.device.is_cuda and not captures else None
    made = make_optimizer(optimizer, ddp_chunks, runtime.state, fused_adam, runtime.device.host_copies)
    if backend is not None:
        made.capture_steps(backend, config.training.cuda_graph_warmup_steps)
    return made


def _check_saved(config: RunConfig) -> None:
    """Reject an update rule whose state would not be saved in the checkpoints of this run."""
    checkpoint = config.checkpoint
    rule = examine_rule(config.optimizer)
    is_saved = (checkpoint.save or checkpoint.local_save) and not checkpoint.no_save_optim
    if rule.unsaved and is_saved:
        raise ConfigurationError(
            f"--optimizer {config.optimizer.elementwise}: {rule.name} keeps state that a checkpoint cannot store: "
            f"{', '.join(rule.unsaved)}; keep it as tensors or numbers in state[parameter], which are saved, or pass "
            "--no-save-optim"
        )


def _check_buffers(config: RunConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Reject a module with a persistent buffer if the run saves checkpoints, which contain only parameters.

    Raises:
        ConfigurationError: there is one, possibly on some ranks only.
    """
    if not (config.checkpoint.save or config.checkpoint.local_save):
        return
    for chunk in chunks:
        for path, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                raise ConfigurationError(
                    f"{path}.{name}".lstrip(".")
                    + (
                        " is a persistent buffer, but checkpoints contain only parameters; make it a parameter with "
                        "a ParamSpec, or register it with persistent=False if it can be computed again"
                    )
                )


def _with_policy(config: RunConfig, runtime: Runtime, num_elements: int) -> tuple[OptimizerConfig, str]:
    """Resolve the fraction of the optimizer state that all ranks offload, and explain it.

    Collective: all ranks use the largest fraction that any of them needs, rounded up to hundredths.
    """
    optimizer = config.optimizer
    if optimizer.optimizer_offload_policy != "auto":
        return optimizer, "--optimizer-offload-policy static"
    free = runtime.device.free_bytes()
    if free is None:
        fraction, why = 1.0, "--optimizer-offload-policy auto: this device has no memory of its own"
    else:
        activations, margin = activation_bytes(config, runtime.state.rank), optimizer.optimizer_offload_auto_threshold
        room = free - activations - margin
        needed = num_elements * state_bytes(optimizer)
        # A rank without parameters needs nothing.
        fraction = min(max(math.ceil(100 * (1 - room / max(needed, 1))) / 100, 0.0), 1.0) if needed else 0.0
        why = (
            f"--optimizer-offload-policy auto: {free / _GIB:.2f} GiB of device memory are free, for "
            f"{needed / _GIB:.2f} GiB of state, {activations / _GIB:.2f} GiB of activations and a margin of "
            f"{margin / _GIB:.2f} GiB"
        )
    fraction = max(of_rank[0] for of_rank in all_gather_from_world([fraction], runtime.state))
    # The policy is now resolved: the optimizer gets a fixed fraction.
    optimizer = dataclasses.replace(optimizer, optimizer_offload_policy="static", optimizer_offload_fraction=fraction)
    return optimizer, why


def _check_host_memory(config: RunConfig, runtime: Runtime) -> None:
    """Reject an offload that does not fit in the host memory of some rank; collective."""
    for (room,) in all_gather_from_world([runtime.device.host_room()], runtime.state):
        check_host_memory(config, room)


ModelProvider = Callable[[RunConfig, Runtime, StageContents], Model]
"""Builds one initialized model chunk of this rank, on its device."""


@dataclass(frozen=True, eq=False)
class ModelAndOptimizer:
    """Model chunks, optimizer and everything else that a training step uses.

    ``chunks`` are this rank's model chunks in pipeline order, and ``ddp_chunks`` their data-parallel wrappers.
    ``connection`` reaches the neighboring stages (None without a pipeline). ``weight_grad_queues`` defer the chunks'
    weight gradients if the pipeline schedule splits the backward pass. ``graphs`` run the chunks' layers with CUDA
    graphs, if configured. ``weights`` are the layer weights that are offloaded during a step's passes.
    ``late_grads`` defers the weight gradients of the output layer in the last chunk. ``float8`` is the state of delayed
    scaling, if there is any. ``float8_weights`` quantize weights that may be kept for a step. ``expert_loads`` counts
    the tokens per expert in MoE models. ``qk_clip`` observes attention logits for QK-clip. ``num_replicas_in_loss``
    divides the loss of each step (see `num_replicas_in_loss`).
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
    float8_weights: tuple[Fp8Quantizers, ...] = ()
    expert_loads: ExpertLoads | None = None
    qk_clip: QueryKeyClip | None = None
    num_replicas_in_loss: int = 1


def with_transformer_impl(config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> RunConfig:
    """Fall back to local layers if some rank lacks Transformer Engine, and log why; collective."""
    model = config.model
    if model.transformer_impl != TRANSFORMER_ENGINE:
        return config
    reason = why_no_transformer_engine(model.params_dtype, runtime.device.torch_device)
    if not any_rank(reason is not None, runtime.state.world):
        return config
    reason = reason or "another process of this run cannot import the package"
    log(f"transformer-engine is not used, because {reason}; this project's own layers are used instead")
    return replace(config, model=replace(model, transformer_impl="local"))


def with_token_dispatcher(config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> RunConfig:
    """Log whether DeepEP exchanges the tokens of MoE layers, and fall back to alltoall if not; collective.

    Raises:
        ConfigurationError: DeepEP does not support the model, its layout, or --inprocess-restart.
    """
    moe = config.model.moe
    if moe.num_experts is None or not moe.asks_for_deepep:
        return config
    reason = why_no_deepep(runtime.state.expert_model.size, runtime.device.torch_device)
    if not any_rank(reason is not None, runtime.state.world):
        if config.restart.inprocess_restart:
            raise ConfigurationError(
                "--moe-token-dispatcher-type flex: DeepEP does not support --inprocess-restart, since its buffers "
                "wait for all ranks when they are freed; use --moe-token-dispatcher-type alltoall"
            )
        check_deepep(config.model, ExpertGroups.of(runtime.state))
        log(f"tokens are exchanged with DeepEP on {moe.moe_deepep_num_sms} multiprocessors of a GPU")
        return config
    reason = reason or "another process of this run cannot import the package deep_ep"
    log(f"DeepEP is not used, because {reason}; tokens are exchanged with alltoall, with the same results")
    if moe.moe_deepep_num_sms != type(moe)().moe_deepep_num_sms:
        log(f"--moe-deepep-num-sms {moe.moe_deepep_num_sms} has no effect without DeepEP")
    return replace(config, model=with_fields(config.model, moe_token_dispatcher_type="alltoall"))


def build_model_and_optimizer(
    config: RunConfig, runtime: Runtime, model_provider: ModelProvider, log: Callable[[str], None]
) -> ModelAndOptimizer:
    """Build the model chunks and the optimizer, and log the parameter count of every model-parallel rank."""
    check_gemm_activation(config.model, runtime.device)
    layout = config.stage_layout
    chunks = tuple(model_provider(config, runtime, contents) for contents in layout.chunks(runtime.state.pp.rank))
    for line in describe_parameter_counts(config, chunks, runtime):
        log(line)
    if config.model.lora_rank:
        log(describe_trainable_parameters(chunks, runtime.state))
    device = runtime.device.torch_device
    has_documents = config.data.reset_attention_mask
    if not config.logging.brief_log:
        log(describe_attention(chunks[0].config, device, config.data.seq_length, has_documents=has_documents))
    # With packed documents the reason was already logged with the command line.
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
    # Gradients of an undivided loss are larger than those of one process by the number of replicas.
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
        compile_regions(chunks, config, runtime, log)
    ddp_chunks = tuple(
        wrap_model(chunk, config.ddp, runtime.state, calculate_per_token_loss=sums_gradients) for chunk in chunks
    )
    optimizer = build_optimizer(config, runtime, ddp_chunks, log)
    qk_clip: QueryKeyClip | None = None
    if model.qk_clip:
        qk_clip = QueryKeyClip(chunks, model, runtime.state.world, device)
        optimizer.row_factors = qk_clip.row_factors
    weights: tuple[WeightOffload, ...] = ()
    if config.model.num_offloaded_layers:
        weights = offload_layers(chunks, runtime.device.host_copies(), config.model)
    graphs: tuple[GraphedLayers, ...] = ()
    if config.training.cuda_graph_impl == "local":
        backend, training = runtime.device.graph_backend(), config.training
        graphs = record_layers(chunks, backend, training.cuda_graph_warmup_steps, with_ends=training.loss_cuda_graph)
    may_keep = config.model.may_keep_quantized_weights(
        shards_weights=config.ddp.shards_weights_over(config.parallel_sizes.num_replicas),
        uses_cuda_graphs=config.training.cuda_graph_impl != "none",
    )
    splits_backward = config.pipeline_schedule == "zero-bubble" or config.model.delay_wgrad_compute
    return ModelAndOptimizer(
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
        float8_weights=weight_quantizers(chunks) if may_keep else (),
        expert_loads=loads_of(chunks, config.model, runtime.state),
        qk_clip=qk_clip,
        num_replicas_in_loss=in_loss,
    )


def check_gemm_activation(model: DecoderConfig, device: Device) -> None:
    """Reject GEMMs with activations where no Triton kernel can run.

    Raises:
        ConfigurationError: the run is on CPU, or Triton does not work.
    """
    if not model.gemm_activation_fusion:
        return
    if not device.is_cuda:
        raise ConfigurationError("--gemm-activation-fusion needs a CUDA device, and this run is on CPU; omit it")
    if not triton_works():
        raise ConfigurationError("--gemm-activation-fusion needs Triton, which cannot be used here; omit it")


def describe_rounded_gradients(config: RunConfig, device: torch.device) -> str | None:
    """Return a line on why gradients are rounded before accumulation although the flags request float32, or None."""
    name = config.model.params_dtype
    is_asked = config.ddp.gradient_accumulation_fusion and config.ddp.grad_dtype(name) == "float32" != name
    if not is_asked or device.type != "cuda":
        return None
    reason = why_no_wide_products(dtype_from_name(name), device)
    if reason is None:
        return None
    return (
        f"WARNING: the gradients of {name} weights are rounded to {name} before they are accumulated in float32: this "
        f"torch has no GEMM that accumulates into float32 ({reason})"
    )


def num_replicas_in_loss(config: RunConfig, num_replicas: int) -> int:
    """Return the divisor of a step's loss that makes the sum over replicas the average of the gradients.

    Division by a power of two changes only a gradient's exponent, so the sum is bit-identical to the average of
    undivided gradients, and needs neither a pass over them nor NCCL's AVG. The divisor is 1, and gradients are averaged
    after the backward pass, in two cases: for other numbers of replicas, which would round earlier than one process
    does, and for float16, whose small exponent range would make the loss scale adapt to the number of replicas.
    """
    is_exact = num_replicas & (num_replicas - 1) == 0 and config.model.params_dtype != "float16"
    averages_later = config.training.calculate_per_token_loss or config.ddp.ddp_average_in_collective
    return num_replicas if is_exact and not averages_later else 1


def offload_layers(chunks: Sequence[Model], copies: HostCopies, config: DecoderConfig) -> tuple[WeightOffload, ...]:
    """Offload activations and weights of the first layers of each chunk to host memory, as configured.

    Returns the objects that move the weights, if weights are offloaded.

    Raises:
        ConfigurationError: the model has no transformer layers.
    """
    blocks = [block for chunk in chunks for block in chunk.blocks]
    if not blocks:
        raise ConfigurationError("--cpu-offloading: this model has no transformer layers; omit it")
    moved: list[WeightOffload] = []
    for block in blocks:
        if config.cpu_offloading_activations:
            block.offload = ActivationOffload(copies, config.num_offloaded_layers)
        if config.cpu_offloading_weights:
            block.weights = WeightOffload(copies, list(block.layers.values())[: config.num_offloaded_layers])
            moved.append(block.weights)
    return tuple(moved)


def record_layers(
    chunks: Sequence[Model], backend: GraphBackend | None, num_warmup_steps: int, *, with_ends: bool = False
) -> tuple[GraphedLayers, ...]:
    """Run the chunks' layers, and ``with_ends`` their embedding and loss, as CUDA graphs after some warm-up steps.

    Raises:
        ConfigurationError: the device has no graphs, or the model no transformer layers or an unknown embedding and
            loss.
    """
    if backend is None:
        raise ConfigurationError("--cuda-graph-impl local needs a CUDA device, and this run is on CPU; omit it")
    blocks = [block for chunk in chunks for block in chunk.blocks]
    if not blocks:
        raise ConfigurationError("--cuda-graph-impl local: this model has no transformer layers; omit it")
    other = next((chunk for chunk in chunks if not isinstance(chunk, GPTModel)), None)
    if with_ends and other is not None:
        raise ConfigurationError(
            f"--loss-cuda-graph captures the embedding and the loss of a GPTModel, not of {type(other).__name__}; omit "
            "it"
        )
    graphs = tuple(GraphedLayers(backend, num_warmup_steps, with_ends=with_ends) for _ in blocks)
    for block, layers in zip(blocks, graphs):
        block.graphs = layers
    return graphs


def connect_pipeline(
    config: RunConfig, runtime: Runtime, layout: StageLayout, model: DecoderConfig
) -> PipelineConnection | None:
    """Create the links to the neighboring stages; every rank of the pipeline must call this."""
    pp = runtime.state.pp
    if pp.size == 1:
        return None
    timeout = timedelta(minutes=config.initialization.distributed_timeout_minutes)
    device = runtime.device.torch_device
    links = create_pipeline_links(pp, wraps_around=layout.num_chunks > 1, timeout=timeout, device=device)
    shape = model.message_shape(config.data.seq_length, config.training.micro_batch_size)
    place = StagePlace(pp.size, pp.rank, layout.num_chunks)
    overlaps = config.model.overlap_p2p_communication
    # If a rank waits for each of its messages, all ranks must send and receive in one common order.
    orders = None if links.post_receives_ahead and overlaps else MessageOrders(place)
    dtype = dtype_from_name(model.params_dtype)
    return PipelineConnection(place, links, lambda microbatch: shape, dtype, orders, overlaps)


def make_late_grads(config: RunConfig, chunks: Sequence[Model]) -> WeightGradQueue | None:
    """Create the queue for the output layer's deferred weight gradients on its stage, if configured."""
    last = chunks[-1]
    if not config.model.defer_embedding_wgrad_compute or not isinstance(last, GPTModel) or not last.post_process:
        return None
    return WeightGradQueue([last.output_weight])


def schedule_of(config: RunConfig) -> ScheduleConfig:
    """Return the learning-rate and weight-decay schedule of a run, in samples."""
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


def describe_parameter_counts(config: RunConfig, chunks: tuple[Model, ...], runtime: Runtime) -> list[str]:
    """Return one line per model-parallel rank, in order, with the padding of the vocabulary included; collective.

    A brief log has one line for the whole model if it is a GPT.
    """
    count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    state = runtime.state
    counts = all_gather_objects((state.pp.rank, state.tp.rank, count), state.model_parallel)
    if config.logging.brief_log:
        size = model_size(config)
        if all(rank_count == size.shards[pp_rank] for pp_rank, _, rank_count in counts):
            return [f" > parameters: {size.block + size.embedding:,}"]
    return [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tp_rank}, {pp_rank}): {rank_count}"
        for pp_rank, tp_rank, rank_count in sorted(counts)
    ]


def describe_trainable_parameters(chunks: tuple[Model, ...], state: ParallelState) -> str:
    """Return a line with the number of trainable parameters of the whole model; collective."""
    here = {
        spec_of(parameter).name: (math.prod(spec_of(parameter).global_shape), parameter.requires_grad)
        for chunk in chunks
        for parameter in chunk.parameters()
    }
    found = {name: each for rank in all_gather_objects(here, state.model_parallel) for name, each in rank.items()}
    total = sum(size for size, _ in found.values())
    trainable = sum(size for size, is_trainable in found.values() if is_trainable)
    share = 100 * trainable / total
    return f" > trainable parameters: {trainable:,} of {total:,} ({share:.2f}%), without padding of the vocabulary"
