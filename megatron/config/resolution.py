"""Resolution of a configuration: derived values, and notes about flags without effect."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.checkpoint import candidate_folders
from megatron.config.run_config import (
    RAW_DATASETS,
    CheckpointConfig,
    RunConfig,
    TokenizerConfig,
    read_data_list,
    read_per_split_lists,
)
from megatron.core.batch_size_rampup import read_batch_size_schedule
from megatron.core.config_base import FieldSpec, field_specs, field_value, with_fields
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.object_store import as_path
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import Fp8Config
from megatron.core.pipeline_parallel import layout_problems, mtp_modules_per_stage
from megatron.core.tensor_parallel import read_overlap_methods, unchunked_gemms


def model_notes(config: RunConfig) -> list[str]:
    """Return the lines."""
    return [
        *_attention_notes(config),
        *_level_notes(config),
        *_window_notes(config),
        *_routing_notes(config),
        *_mtp_notes(config),
    ]


def _attention_notes(config: RunConfig) -> list[str]:
    model = config.model
    if model.attention_backend != "flash":
        return []
    if config.data.reset_attention_mask:
        return ["flash-attn is not used with packed documents: --reset-attention-mask uses torch's attention"]
    if model.context_parallel_size > 1 and (rings := {"p2p", "a2a+p2p"} & {*model.cp_comm_type}):
        name = max(rings)
        return [f"flash-attn is not used with --cp-comm-type {name}: merged blocks use torch's attention"]
    return []


def _level_notes(config: RunConfig) -> list[str]:
    sizes = config.model.hierarchical_context_parallel_sizes
    if not sizes or "a2a+p2p" in config.model.cp_comm_type:
        return []
    given = " ".join(map(str, sizes))
    return [f"--hierarchical-context-parallel-sizes {given} has no effect without --cp-comm-type a2a+p2p"]


def _window_notes(config: RunConfig) -> list[str]:
    model = config.model
    try:
        is_idle = model.window_size is not None and not any(model.layer_windows)
    except ValueError:
        return []  # The checks report the problem.
    if not is_idle:
        return []
    pattern = model.window_attn_skip_freq
    return [f"--window-size {model.window_size} has no effect: --window-attn-skip-freq {pattern} selects no layer"]


def _mtp_notes(config: RunConfig) -> list[str]:
    model = config.model
    layout = model.pipeline_model_parallel_layout
    if layout is None or layout_problems(model, model.num_layers, layout):
        return []  # The checks report the problem.
    named = mtp_modules_per_stage(layout)
    if not any(named[:-1]):
        return []
    return [
        f"--pipeline-model-parallel-layout {layout}: the MTP modules (m) run on the stage of the loss (L), and not on "
        "a stage before it; results are the same"
    ]


def _routing_notes(config: RunConfig) -> list[str]:
    if not config.model.routes_at_random:
        return []
    return [
        "--moe-router-force-load-balancing selects experts at random for a balanced load: the router does not learn, "
        "so use it only for benchmarks"
    ]


@dataclasses.dataclass(frozen=True)
class _Idle:
    """Fields without effect under a condition on several fields; ``reason`` completes "has no effect".

    Conditions on one other field, or on the absence of several, are options of the field: see `idle_with`.
    """

    fields: tuple[str, ...]
    condition: Callable[[RunConfig], bool]
    reason: str


_IDLE = (
    _Idle(
        (
            "overlap_grad_reduce",
            "ddp_bucket_size",
            "ddp_average_in_collective",
            "check_weight_hash_across_dp_replicas_interval",
            "check_gradient_hash_across_dp_replicas_interval",
        ),
        lambda config: config.parallel_sizes.num_replicas == 1,
        "with one data-parallel rank",
    ),
    _Idle(
        ("check_weight_hash_across_dp_replicas_interval",),
        lambda config: config.ddp.shards_weights and config.parallel_sizes.num_replicas > 1,
        "with --data-parallel-sharding-strategy optim_grads_params, which leaves no copies to compare",
    ),
    _Idle(
        ("use_nccl_ub", "disable_symmetric_registration"),
        lambda config: config.ddp.shards_gradients,
        "with ZeRO-2 and FSDP, whose buffers are freed and allocated in each step",
    ),
    _Idle(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda config: config.model.fp16 and config.optimizer.loss_scale is not None,
        "with --loss-scale, which is constant",
    ),
    _Idle(
        ("rope_type",),
        lambda config: (
            not config.model.mla.multi_latent_attention
            and not config.model.stretches_positions
            and config.model.rope.rope_type != "proportional"
        ),
        "without --multi-latent-attention, except for proportional and for yarn with a --rotary-scaling-factor other "
        "than 1",
    ),
    _Idle(
        (
            *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
            "yarn_correction_range_round_to_int",
        ),
        lambda config: config.model.mla.multi_latent_attention and not config.model.stretches_positions,
        "without YaRN scaling: --rope-type yarn and a --rotary-scaling-factor other than 1",
    ),
    _Idle(
        ("rotary_scaling_factor",),
        lambda config: (
            config.model.mla.multi_latent_attention
            and config.model.rope.rope_type == "rope"
            and config.model.rope.mscale_all_dim == 0.0
        ),
        "with --rope-type rope and --mscale-all-dim 0.0",
    ),
    _Idle(
        ("mscale_all_dim",),
        lambda config: config.model.mla.multi_latent_attention and config.model.rope.rotary_scaling_factor <= 1.0,
        "with a --rotary-scaling-factor of 1.0 or less",
    ),
    _Idle(
        ("kv_channels",),
        lambda config: (
            config.model.mla.multi_latent_attention
            and config.model.kv_channels != config.model.hidden_size // max(config.model.num_attention_heads, 1)
        ),
        "with --multi-latent-attention: --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim are the head sizes",
    ),
    _Idle(
        ("no_rope_freq",),
        # The value is not checked yet.
        lambda config: (
            (number := config.model.no_rope_freq or "").isdecimal() and int(number) > config.model.num_layers
        ),
        "on fewer layers than its value: all layers use rotary embeddings",
    ),
    _Idle(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda config: config.optimizer.elementwise != "adam",
        "without Adam",
    ),
    _Idle(
        ("lion_beta1", "lion_beta2"), lambda config: config.optimizer.elementwise != "lion", "without --optimizer lion"
    ),
    _Idle(
        ("lr_warmup_init",),
        lambda config: not config.schedule_lengths.lr_warmup_steps,
        "without a warmup (--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction)",
    ),
    _Idle(
        ("use_precision_aware_optimizer",),
        lambda config: (
            {
                *(config.optimizer.main_grads_dtype, config.optimizer.main_params_dtype),
                *(config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype),
            }
            == {"fp32"}
        ),
        "with fp32 only (--main-grads-dtype, --main-params-dtype, --exp-avg-dtype, --exp-avg-sq-dtype)",
    ),
    _Idle(
        ("fp8_wgrad", "fp8_param_gather", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
        lambda config: config.model.lora_rank > 0,
        "with --lora-rank: no weight of the model itself is trained",
    ),
    _Idle(
        ("max_consecutive_skipped_iterations",),
        lambda config: config.ddp.check_for_nan_in_loss_and_grad and not config.model.fp16,
        "without --fp16: the first gradient that is not finite ends the run or follows --spike-policy; "
        "--no-check-for-nan-in-loss-and-grad skips it",
    ),
)


def idle_flags(config: RunConfig) -> Iterator[str]:
    """Yield a note for each given flag that has no effect because of other flags."""
    fields = {spec.name: (spec, value) for spec, value in config.flags()}
    given = {name: spec for name, (spec, value) in fields.items() if value != spec.default}
    reasons: list[tuple[FieldSpec, str | None]] = []
    for spec in given.values():
        if (condition := spec.options.idle) is not None:
            reasons.append((spec, condition.reason([fields[name] for name in condition.names])))
    for idle in _IDLE:
        names = [name for name in idle.fields if name in given]
        if names and idle.condition(config):
            reasons.extend((given[name], idle.reason) for name in names)
    for spec, reason in reasons:
        if reason is None:
            continue
        value = fields[spec.name][1]
        words = " ".join(map(str, value)) if spec.is_sequence else value
        yield f"{spec.typed(words)} has no effect {reason}"


def machine_notes(config: RunConfig, is_cuda: bool, has_launcher_rank: bool, *, has_nccl: bool = True) -> Iterator[str]:
    """Yield a note for each given flag that has no effect in this process.

    ``has_launcher_rank``: the environment (LOCAL_RANK) selects this process's device. ``has_nccl``: the process groups
    use NCCL.
    """
    path = config.initialization.nccl_communicator_config_path
    if path is not None and not has_nccl:
        yield f"--nccl-communicator-config-path {path} has no effect: the process groups do not use NCCL"
    if config.ddp.has_user_buffers and not has_nccl:
        yield "--use-nccl-ub has no effect: the process groups do not use NCCL"
    local_rank = config.initialization.local_rank
    if local_rank is not None and has_launcher_rank:
        yield f"--local-rank {local_rank} has no effect: the environment variable LOCAL_RANK is used"
    elif local_rank is not None and not is_cuda:
        yield f"--local-rank {local_rank} has no effect on a CPU: it is a CUDA device number"
    if is_cuda:
        return
    level = config.training.empty_unused_memory_level
    if level:
        yield f"--empty-unused-memory-level {level} has no effect on a CPU: only CUDA memory is cached"
    if config.training.overlap_step_results:
        yield "--overlap-step-results has no effect on a CPU, which computes at the launch"
    if config.initialization.disable_bf16_reduced_precision_matmul:
        yield "--disable-bf16-reduced-precision-matmul has no effect on a CPU, which accumulates in float32"
    if not config.ddp.gradient_accumulation_fusion:
        yield (
            "--no-gradient-accumulation-fusion has no effect on a CPU: there, gradients of 16-bit weights are always "
            "rounded before they are accumulated in float32"
        )
    yield from _idle_offload_notes(config.optimizer)


def _idle_offload_notes(optimizer: OptimizerConfig) -> Iterator[str]:
    if not optimizer.optimizer_cpu_offload:
        return
    if optimizer.use_torch_optimizer_for_cpu_offload:
        yield "--use-torch-optimizer-for-cpu-offload has no effect on a CPU: apex has no optimizer for it"
    for flag, is_pinned in (
        ("--no-pin-cpu-grads", optimizer.pin_cpu_grads),
        ("--no-pin-cpu-params", optimizer.pin_cpu_params),
    ):
        if not is_pinned:
            yield f"{flag} has no effect on a CPU: memory is pinned only for copies to and from a GPU"
    margin = optimizer.optimizer_offload_auto_threshold
    if optimizer.optimizer_offload_policy == "auto" and margin != OptimizerConfig.optimizer_offload_auto_threshold:
        yield f"--optimizer-offload-auto-threshold {margin} has no effect on a CPU, which has no device memory"


_HUGGING_FACE = "tokenizer.json"
_SENTENCE_PIECE = "tokenizer.model"


def choose_tokenizer(
    config: RunConfig, is_type_given: bool, reads_bytes: bool, notes: list[str], problems: list[str]
) -> RunConfig:
    """Take the tokenizer from the folder of --tokenizer-model or --load if no type or vocabulary is given.

    With --patch-tokenizer-type the folder must have a tokenizer, unless it is GPT2BPETokenizer. If no flag
    and no folder has a tokenizer, ``reads_bytes`` selects ByteTokenizer for --train-data.
    """
    tokenizer = config.tokenizer
    patch = tokenizer.patch_tokenizer_type
    if is_type_given or tokenizer.vocab_file is not None or tokenizer.merge_file is not None:
        if patch is not None and tokenizer.tokenizer_type not in ("HuggingFaceTokenizer", patch):
            notes.append(
                f"--patch-tokenizer-type {patch} has no effect: the other flags select the tokenizer "
                f"{tokenizer.tokenizer_type}"
            )
        return config
    if patch == "GPT2BPETokenizer":
        return config
    source, folder = "--load", config.checkpoint.load
    if tokenizer.tokenizer_model is not None:
        source, folder = "--tokenizer-model", tokenizer.tokenizer_model
    found = None if folder is None else _tokenizer_in(Path(folder), tokenizer)
    if found is not None:
        notes.append(f"using the tokenizer of {source} {folder}: {found.tokenizer_type}")
        return dataclasses.replace(config, tokenizer=found)
    if patch is None:
        if tokenizer.tokenizer_type != "GPT2BPETokenizer":
            return config
        if tokenizer.tokenizer_model is None:
            if not reads_bytes or not config.data.train_data:
                return config
            notes.append(
                "no tokenizer is given: using ByteTokenizer, one token per byte of the text (another: --tokenizer-type)"
            )
            return dataclasses.replace(config, tokenizer=dataclasses.replace(tokenizer, tokenizer_type="ByteTokenizer"))
        problems.append(
            f"--tokenizer-model {folder} is not a folder with {_HUGGING_FACE} or {_SENTENCE_PIECE}, so its type is not "
            "known; add --tokenizer-type"
        )
    elif folder is None:
        problems.append(f"--patch-tokenizer-type {patch} uses the tokenizer of --load DIR; add --load DIR")
    elif not os.path.exists(folder):
        problems.append(f"--patch-tokenizer-type {patch}: {source} {folder} does not exist; pass an existing folder")
    else:
        problems.append(
            f"--patch-tokenizer-type {patch}: {source} {folder} has no {_HUGGING_FACE}; save the fast tokenizer there, "
            "or pass its folder with --tokenizer-model (tokenizers with custom Python code are not supported)"
        )
    # The problem is reported: prevent another one about the missing files of GPT-2.
    chosen = dataclasses.replace(tokenizer, tokenizer_type="NullTokenizer", vocab_size=tokenizer.vocab_size or 1)
    return dataclasses.replace(config, tokenizer=chosen)


def _tokenizer_in(folder: Path, tokenizer: TokenizerConfig) -> TokenizerConfig | None:
    if (folder / _HUGGING_FACE).is_file():
        return dataclasses.replace(tokenizer, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if (folder / _SENTENCE_PIECE).is_file():
        model = str(folder / _SENTENCE_PIECE)
        return dataclasses.replace(tokenizer, tokenizer_type="Llama2Tokenizer", tokenizer_model=model)
    return None


DEFAULT_SPLIT = "969, 30, 1"
_GIVEN_ANYWAY = ("max_position_embeddings",)
"""Fields that Megatron requires for every type of position embedding."""


@dataclasses.dataclass(frozen=True)
class Resolution:
    """Resolved configuration, with notes for the user and problems."""

    config: RunConfig
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def resolve(config: RunConfig) -> Resolution:
    """Set every value that is derived from another part; idempotent."""
    notes: list[str] = []
    problems: list[str] = []
    config = _resolve_data(config, problems)
    config = _resolve_fine_tuning(config, notes)
    config = _resolve_model(config, notes)
    config = _resolve_tp_overlap(config, notes, problems)
    config = _resolve_pipeline_overlap(config, notes)
    config = dataclasses.replace(config, checkpoint=resolve_checkpoint(config.checkpoint, notes, problems))
    config = _resolve_batch(config, problems)
    config = _resolve_data_parallelism(config, notes)
    config = _resolve_precision(config)
    config = _resolve_graphs(config, notes)
    config = _resolve_weight_decay(config)
    notes.extend(model_notes(config))
    notes.extend(_float8_notes(config))
    notes.extend(_condition_notes(config))
    notes.extend(_offload_notes(config))
    notes.extend(_checkpoint_notes(config))
    notes.extend(_validation_notes(config))
    notes.extend(idle_flags(config))
    return Resolution(config, tuple(notes), tuple(problems))


def _resolve_data(config: RunConfig, problems: list[str]) -> RunConfig:
    data = config.data
    try:
        if data.data_args_path is not None:
            words = read_data_list(data.data_args_path, "--data-args-path")
            if data.data_path not in ((), words):
                problems.append(
                    f"--data-path and --data-args-path {data.data_args_path} exclude each other; omit one of them"
                )
            data = dataclasses.replace(data, data_path=words)
        if data.per_split_data_args_path is not None:
            lists = read_per_split_lists(data.per_split_data_args_path, "--per-split-data-args-path")
            for key, given in zip(lists, (data.train_data_path, data.valid_data_path, data.test_data_path)):
                if given not in ((), lists[key]):
                    problems.append(
                        f"--{key}-data-path and --per-split-data-args-path {data.per_split_data_args_path} exclude "
                        "each other; omit one of them"
                    )
            data = dataclasses.replace(
                data,
                train_data_path=lists["train"],
                valid_data_path=lists["valid"],
                test_data_path=lists["test"],
            )
    except ConfigurationError as error:
        problems.extend(error.problems)
    if data.split is not None:
        # NVIDIA's Llama script has nested quotes: Megatron parses only the numbers.
        data = dataclasses.replace(data, split=data.split.strip("'\" "))
    elif not data.has_data_per_split and not data.is_registered:
        data = dataclasses.replace(data, split=DEFAULT_SPLIT)
    if data.seq_length == 0:
        data = dataclasses.replace(data, seq_length=config.model.max_position_embeddings)
    return dataclasses.replace(config, data=data)


def _resolve_fine_tuning(config: RunConfig, notes: list[str]) -> RunConfig:
    """Separate packed conversations, and weight all answer tokens equally."""
    data = config.data
    if not data.sft:
        return config
    packs = data.sft_packing and (data.dataset not in RAW_DATASETS or data.reset_position_ids)
    if packs:
        notes.append(
            "--sft packs conversations: --reset-position-ids and --reset-attention-mask are on; --no-sft-packing "
            "makes each conversation a sample"
        )
    elif data.sft_packing:
        notes.append(f"--dataset {data.dataset}: each conversation is a sample; --reset-position-ids packs them")
    if not config.training.calculate_per_token_loss:
        notes.append("--sft: all answer tokens have the same weight, as with --calculate-per-token-loss")
        if config.ddp.ddp_average_in_collective:
            notes.append("--ddp-average-in-collective has no effect with --sft: sums are divided by a number of tokens")
            config = dataclasses.replace(config, ddp=dataclasses.replace(config.ddp, ddp_average_in_collective=False))
    if data.max_padding_length is not None and data.max_padding_length > data.seq_length:
        notes.append(
            f"--max-padding-length {data.max_padding_length} has no effect: --seq-length {data.seq_length} truncates "
            "conversations first"
        )
    template = data.chat_template
    if template is None and data.sft_tokenizer_prompt_format != "default":
        template = data.sft_tokenizer_prompt_format
    data = dataclasses.replace(
        data,
        sft_packing=packs,
        chat_template=template,
        reset_position_ids=packs or data.reset_position_ids,
        reset_attention_mask=packs or data.reset_attention_mask,
    )
    training = dataclasses.replace(config.training, calculate_per_token_loss=True)
    return dataclasses.replace(config, data=data, training=training)


def _resolve_model(config: RunConfig, notes: list[str]) -> RunConfig:
    model = config.model
    if model.max_position_embeddings == 0:
        model = dataclasses.replace(model, max_position_embeddings=config.data.seq_length)
    if model.activation == "gelu_tanh" and not model.openai_gelu and not model.add_bias_linear:
        # Without a bias Megatron-LM fuses nothing, which changes the form of GELU.
        notes.append("--disable-bias-linear: GELU is the exact form; for the tanh form add --openai-gelu")
        model = dataclasses.replace(model, bias_gelu_fusion=False)
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        notes.append("--sequence-parallel has no effect with --tensor-model-parallel-size 1: turned off")
        model = dataclasses.replace(model, sequence_parallel=False)
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups != heads and not model.group_query_attention:
        notes.append(
            f"--num-query-groups {groups} has no effect without --group-query-attention: "
            f"each of the {heads} heads has its own key and value"
        )
        model = dataclasses.replace(model, num_query_groups=heads)
    if model.recompute_num_layers is not None and model.recompute_granularity != "full":
        notes.append(
            f"--recompute-num-layers {model.recompute_num_layers} has no effect without --recompute-granularity full"
        )
        model = dataclasses.replace(model, recompute_num_layers=None)
    moe = model.moe
    if moe.moe_token_dispatcher_type == "flex" and not moe.asks_for_deepep:
        backend = f"--moe-flex-dispatcher-backend {moe.moe_flex_dispatcher_backend}"
        notes.append(f"{backend}: HybridEP is not used; tokens are exchanged with alltoall, with the same results")
        if moe.moe_deepep_num_sms != type(moe)().moe_deepep_num_sms:
            notes.append(f"--moe-deepep-num-sms {moe.moe_deepep_num_sms} has no effect with {backend}")
    return dataclasses.replace(config, model=model)


def _resolve_tp_overlap(config: RunConfig, notes: list[str], problems: list[str]) -> RunConfig:
    model = config.model
    if not model.tp_comm_overlap:
        return config
    if not model.sequence_parallel:
        sizes = f"--tensor-model-parallel-size {model.tensor_model_parallel_size}"
        missing = sizes if model.tensor_model_parallel_size == 1 else f"{sizes} without --sequence-parallel"
        notes.append(f"--tp-comm-overlap has no effect with {missing}: turned off")
        return dataclasses.replace(config, model=dataclasses.replace(model, tp_comm_overlap=False))
    whole = unchunked_gemms(model.fp8, model.tp_comm_overlap_impl)
    if whole is not None:
        notes.append(f"--tp-comm-overlap: {whole} are not split into chunks")
    if model.tp_comm_overlap_cfg is None:
        return config
    methods: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    try:
        methods, ignored = read_overlap_methods(model.tp_comm_overlap_cfg)
    except ConfigurationError as error:
        problems.extend(error.problems)
    if ignored:
        notes.append(
            f"--tp-comm-overlap-cfg {model.tp_comm_overlap_cfg}: {', '.join(ignored)} have no effect: there are as "
            "many chunks as ranks, and transformer-engine's kernels are not used"
        )
    return dataclasses.replace(config, model=dataclasses.replace(model, tp_comm_overlap_methods=methods))


def _resolve_pipeline_overlap(config: RunConfig, notes: list[str]) -> RunConfig:
    """Turn off options without effect in this pipeline, with a note for each."""
    model = config.model
    alone = "with --pipeline-model-parallel-size 1" if model.pipeline_model_parallel_size == 1 else ""
    splits = "with --pipeline-schedule zero-bubble, which defers weight gradients itself"
    splits = splits if model.pipeline_schedule == "zero-bubble" else ""
    delays = "with --delay-wgrad-compute, which computes them with the others" if model.delay_wgrad_compute else ""
    reduces = f"with --data-parallel-sharding-strategy {config.ddp.data_parallel_sharding_strategy}: gradients are "
    reduces += "reduced after each micro-batch"
    reduces = reduces if config.ddp.shards_gradients and config.parallel_sizes.num_replicas > 1 else ""
    deferred = alone or splits or delays or reduces
    reasons = {
        "overlap_p2p_communication": alone,
        "delay_wgrad_compute": alone or splits,
        "defer_embedding_wgrad_compute": deferred,
        "wgrad_deferral_limit": deferred
        if model.defer_embedding_wgrad_compute and model.wgrad_deferral_limit > 0
        else "",
    }
    for spec, value in config.flags():
        reason = reasons.get(spec.name)
        if reason and value != spec.default:
            notes.append(f"{spec.typed(value)} has no effect {reason}")
            model = with_fields(model, **{spec.name: spec.default})
    return dataclasses.replace(config, model=model)


def resolve_checkpoint(checkpoint: CheckpointConfig, notes: list[str], problems: list[str]) -> CheckpointConfig:
    """Load --pretrained-checkpoint if --load has no checkpoint yet."""
    pretrained, load = checkpoint.pretrained_checkpoint, checkpoint.load
    if pretrained is None or pretrained == load:
        return checkpoint
    if load is not None and _holds_weights(as_path(load)):
        notes.append(f"--pretrained-checkpoint {pretrained} is not read, because --load {load} contains a checkpoint")
        return checkpoint
    if not _holds_weights(as_path(pretrained)):
        problems.append(f"--pretrained-checkpoint {pretrained} contains no checkpoint; pass a folder that contains one")
    notes.append(f"--pretrained-checkpoint {pretrained}: the run starts from its weights, at iteration 0")
    return dataclasses.replace(checkpoint, load=pretrained, finetune=True)


def _holds_weights(folder: Path) -> bool:
    try:
        return bool(candidate_folders(folder)) or any(folder.glob("*.safetensors"))
    except CheckpointError:
        return True  # something exists: loading reports what is wrong


def _resolve_batch(config: RunConfig, problems: list[str]) -> RunConfig:
    training = config.training
    if training.step_batch_size_schedule is not None:
        try:
            steps, last = read_batch_size_schedule(training.step_batch_size_schedule, config.data.seq_length)
        except ConfigurationError as error:
            problems.extend(error.problems)
            return config
        if training.global_batch_size not in (0, last):
            problems.append(
                f"--global-batch-size {training.global_batch_size} is not the last size of --step-batch-size-schedule "
                f"{training.step_batch_size_schedule!r}; use {last} or omit it"
            )
        training = dataclasses.replace(training, global_batch_size=last, batch_size_steps=steps)
    elif not training.global_batch_size:
        batch = training.micro_batch_size * max(config.data_parallel_size, 1)
        training = dataclasses.replace(training, global_batch_size=batch)
    return dataclasses.replace(config, training=training)


def _resolve_precision(config: RunConfig) -> RunConfig:
    optimizer = dataclasses.replace(config.optimizer, params_dtype=config.model.params_dtype)
    ddp = config.ddp
    if optimizer.main_grads_dtype == "bf16" and config.model.params_dtype == "bfloat16":
        ddp = dataclasses.replace(ddp, grad_reduce_in_bf16=True)
    return dataclasses.replace(config, optimizer=optimizer, ddp=ddp)


def _resolve_data_parallelism(config: RunConfig, notes: list[str]) -> RunConfig:
    ddp = config.ddp
    if (ddp.use_torch_fsdp2 or ddp.use_megatron_fsdp) and ddp.data_parallel_sharding_strategy == "no_shard":
        ddp = dataclasses.replace(ddp, data_parallel_sharding_strategy="optim_grads_params")
    if ddp.shards_optimizer and config.parallel_sizes.num_replicas == 1:
        notes.append(
            "--use-distributed-optimizer, --data-parallel-sharding-strategy and --overlap-param-gather have no effect "
            "with one data-parallel rank: turned off"
        )
        ddp = dataclasses.replace(
            ddp,
            use_distributed_optimizer=False,
            data_parallel_sharding_strategy="no_shard",
            overlap_param_gather=False,
        )
    if ddp.shards_weights and ddp.overlap_param_gather:
        notes.append(
            "--overlap-param-gather has no effect with --data-parallel-sharding-strategy optim_grads_params: weights "
            "are always gathered while the previous layer runs"
        )
        ddp = dataclasses.replace(ddp, overlap_param_gather=False)
    if ddp.shards_optimizer:
        ddp = dataclasses.replace(ddp, use_distributed_optimizer=True)
    elif ddp.overlap_param_gather:
        notes.append("--overlap-param-gather has no effect without --use-distributed-optimizer: turned off")
        ddp = dataclasses.replace(ddp, overlap_param_gather=False)
    if config.model.fp8.fp8_param_gather and config.parallel_sizes.num_replicas == 1:
        notes.append("--fp8-param-gather has no effect with one data-parallel rank: nothing is gathered")
    return dataclasses.replace(config, ddp=ddp)


def _resolve_graphs(config: RunConfig, notes: list[str]) -> RunConfig:
    """Run at least two steps before CUDA graphs are captured with delayed scaling.

    The first step of delayed scaling has no amax yet. Its scales are in other memory, so that Triton compiles other
    variants of the cast than for later steps, which also cast activations as they are computed. CUDA compiles no kernel
    during a capture.
    """
    steps, fp8 = config.training.cuda_graph_warmup_steps, config.model.fp8
    is_delayed = fp8.fp8_format is not None and fp8.fp8_recipe == "delayed"
    if config.training.cuda_graph_impl != "local" or not is_delayed or steps >= 2:
        return config
    notes.append(f"--cuda-graph-warmup-steps {steps} is too small for --fp8-recipe delayed: the run uses 2")
    return dataclasses.replace(config, training=dataclasses.replace(config.training, cuda_graph_warmup_steps=2))


def _resolve_weight_decay(config: RunConfig) -> RunConfig:
    schedule, weight_decay = config.scheduler, config.optimizer.weight_decay
    if schedule.weight_decay_incr_style != "constant":
        return config
    if schedule.start_weight_decay is None:
        schedule = dataclasses.replace(schedule, start_weight_decay=weight_decay)
    if schedule.end_weight_decay is None:
        schedule = dataclasses.replace(schedule, end_weight_decay=weight_decay)
    return dataclasses.replace(config, scheduler=schedule)


_OF_NVFP4 = ("fp4_format", "fp8_wgrad")
"""Fields of FP8's group that have an effect with NVFP4 and do not need another field."""


def _float8_notes(config: RunConfig) -> list[str]:
    if config.model.fp8.fp8_format is not None:
        return []
    specs = {spec.name: spec for spec in field_specs(Fp8Config)}
    wanted = specs["fp8_format"]
    given = [spec for spec in specs.values() if field_value(config.model, spec.name) != spec.default]
    return [
        f"{spec.typed(field_value(config.model, spec.name))} has no effect without {wanted.typed(wanted.metavar)}"
        for spec in given
        if spec.options.needs is None and not (config.model.fp8.is_quantized and spec.name in _OF_NVFP4)
    ]


def _condition_notes(config: RunConfig) -> list[str]:
    """Add a note for each flag without effect because another flag lacks the required value."""
    fields = {spec.name: (spec, value) for spec, value in config.flags()}
    notes = []
    for spec, value in fields.values():
        if spec.options.where is None or spec.name in _GIVEN_ANYWAY or value == spec.default:
            continue
        name, wanted = spec.options.where
        other, found = fields[name]
        if found != wanted:
            notes.append(f"{spec.typed(value)} has no effect without {other.typed(wanted)}")
    return notes


def _offload_notes(config: RunConfig) -> list[str]:
    optimizer = config.optimizer
    if optimizer.optimizer_cpu_offload:
        is_static = optimizer.optimizer_offload_policy == "static"
        return (
            ["--optimizer-offload-fraction 0 offloads nothing"] if is_static and not optimizer.offload_fraction else []
        )
    if optimizer.optimizer_offload_fraction is None:
        return []
    flag = f"--optimizer-offload-fraction {optimizer.optimizer_offload_fraction}"
    return [f"{flag} has no effect without --optimizer-cpu-offload"]


def _checkpoint_notes(config: RunConfig) -> list[str]:
    """Return a line if a folder of checkpoints gets no metrics file."""
    checkpoint = config.checkpoint
    if checkpoint.save is not None and checkpoint.local_save is None and config.logging.metrics_jsonl is None:
        return [f"--save {checkpoint.save} cannot contain a metrics.jsonl; add --metrics-jsonl FILE to write one"]
    return []


def _validation_notes(config: RunConfig) -> list[str]:
    if config.validation.full_validation and config.validation.extra_valid_data_samples:
        return ["--extra-valid-data-samples has no effect with --full-validation: all of each set is evaluated"]
    return []
