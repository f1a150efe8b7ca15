"""Evaluate predictions on measured runs: read the records, derive their plans, and report errors by model.

A file of measured runs has one record per run, with the model's shape, the layout and the outcome.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config_base import from_fields
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.errors import ConfigurationError, DataError
from megatron.core.models.gpt import GPTConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.pipeline_parallel import default_schedule, plan_stage_layout
from megatron.core.transformer import default_ffn_hidden_size, parse_layer_pattern, parse_window
from megatron.planner.gpu import Gpu, gpu_in_text
from megatron.planner.implementations import MEGATRON_BRIDGE, Implementation, implementation_of_software
from megatron.planner.plan import Plan
from megatron.planner.prediction import HOPPER_MACHINES, Platform, Prediction, predict

_MOST = 10**12
"""Largest number that a record may contain."""


class Fields:
    """Fields of one JSON object of a record, with checks whose errors name the object."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def part(self, name: str) -> Fields:
        """Return a field that is an object; it is empty if the field is missing or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value or {}, f"{self.where}: {name}")

    def integer(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """Return a whole number from 1 to ``most``, or the default if the field is missing or null."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a whole number of 1 or more")
        if value > most:
            raise self.error(name, f"a whole number of at most {most}")
        return value

    def optional(self, name: str) -> int | None:
        """Return a whole number of at least 1, or None if the field is missing or null."""
        return None if self.values.get(name) is None else self.integer(name)

    def switch(self, name: str, default: bool) -> bool:
        """Return true or false, or the default if the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return text, or the default if the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def number(self, name: str) -> float | None:
        """Return a number above 0, or None if the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.error(name, "a number above 0")
        return float(value)

    def error(self, name: str, wanted: str) -> DataError:
        """Return the error for a field that is missing or of another type."""
        if name not in self.values:
            return DataError(f"{self.where}: {name} is missing; {wanted} is expected")
        found = json.dumps(self.values[name])
        shown = found if len(found) <= 60 else found[:57] + "..."
        return DataError(f"{self.where}: {name} is {shown}; {wanted} is expected")


@dataclass(frozen=True)
class Measured:
    """Measured results of a run, and which of them are scored; unknown results are None."""

    outcome: str
    memory_mib: float | None
    ms_per_iter: float | None
    scores_memory: bool
    scores_time: bool
    scores_outcome: bool


@dataclass(frozen=True)
class MeasuredRun:
    """One record; ``shows_allocator`` says that memory is the peak of the allocator, not the used memory of a GPU."""

    id: str
    model_name: str
    fields: Fields
    measured: Measured
    shows_allocator: bool


def read_runs(path: Path, left_out: list[DataError] | None = None) -> Sequence[MeasuredRun]:
    """Read a file of measured runs.

    If ``left_out`` is given, unusable records are skipped and their errors are added to it.

    Raises:
        DataError: the file cannot be read or has another format, or a record is unusable and ``left_out`` is not given.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; pass a file of measured runs") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({str(error)[:100]}); pass a file of measured runs") from error
    records = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(f'{path} has no list of records; it should be {{"runs": [{{...}}, ...]}}')
    runs: dict[str, MeasuredRun] = {}
    for number, record in enumerate(records):
        with leaving_out(left_out):
            run = _read_run(Fields(record, f"{path}: record {number}"))
            if run.id in runs:
                raise DataError(f"{path}: two records have the id {run.id}; rename one of them")
            runs[run.id] = run
    return list(runs.values())


@contextmanager
def leaving_out(left_out: list[DataError] | None) -> Iterator[None]:
    """Add the error of one record to ``left_out``, or raise it if there is no list."""
    try:
        yield
    except DataError as error:
        if left_out is None:
            raise
        left_out.append(error)


def _read_run(fields: Fields) -> MeasuredRun:
    name = fields.text("id")
    if not name:
        raise fields.error("id", "a string that identifies the record")
    fields.where = f"{fields.where.rpartition(': ')[0]}: run {name}"
    scored, memory = fields.part("scored"), fields.part("memory")
    per_rank = memory.part("per_rank")
    peaks = [Fields(rank, f"{per_rank.where}") for rank in per_rank.values.values() if isinstance(rank, dict)]
    allocated = [peak.number("max_allocated") for peak in peaks]
    used = memory.number("value_mib")
    measured = Measured(
        outcome=fields.text("outcome"),
        memory_mib=max((peak for peak in allocated if peak is not None), default=used),
        ms_per_iter=fields.number("ms_per_iter"),
        scores_memory=scored.switch("memory", True),
        scores_time=scored.switch("time", True),
        scores_outcome=scored.switch("outcome", True),
    )
    shows_allocator = bool(per_rank.values) or "allocated" in memory.text("kind")
    return MeasuredRun(name, fields.part("model").text("name", "unnamed"), fields, measured, shows_allocator)


_PRECISIONS = ("bf16", "fp16", "fp8", "fp32")
_RECIPES = {"current": "tensorwise", "tensorwise": "tensorwise", "mx": "mxfp8", "block": "blockwise", "row": "rowwise"}
"""FP8 recipes by the words that describe a precision."""
_RECOMPUTES = ("none", "selective", "full", "cpu_offload")
_MOST_LAYERS, _MOST_FURTHER, _MOST_RANKS = 10_000, 64, 100_000
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_TEXT_FIELDS = ("window_size", "window_attn_skip_freq")
"""Fields of a model that few records have, by the names of this project's flags."""
_EXPERT_FIELDS = ("num_experts", "num_moe_experts", "moe_num_experts", "n_routed_experts")


def recorded_implementation(fields: Fields) -> Implementation:
    """Return the implementation that a record's software field describes."""
    software = fields.part("software")
    described = " ".join(str(value) for value in software.values.values())
    return implementation_of_software(described, fields.switch("flash_attention", True))


def recorded_plan(fields: Fields) -> Plan:
    """Return the plan of a record.

    Fields that a record leaves out get the usual values: FlashAttention, the distributed optimizer, sequence
    parallelism with tensor parallelism, and overlapped communication.

    Raises:
        DataError: a field is missing or of another type.
        ConfigurationError: the layout is invalid; the message lists every problem, with values that would work.
    """
    shape = fields.part("model")
    tp, pp, cp = (fields.integer(axis, 1, most=_MOST_RANKS) for axis in ("tp", "pp", "cp"))
    dp, world_size = _replicas(fields, tp * pp * cp)
    ep = fields.integer("ep", 1, most=_MOST_RANKS)
    sizes = ParallelSizes(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=_expert_tp(fields, tp * cp * dp, ep, tp))
    is_grid = dp * tp * pp * cp == world_size
    problems = sizes.problems(world_size) if is_grid else [_not_a_grid(world_size, tp * pp * cp)]
    problems += _unknown(fields, dp * cp)
    problems += _wrong_experts(shape, sizes)
    problems += _wrong_texts(shape, fields)
    if problems:
        raise ConfigurationError(problems)
    model = _model(fields, shape, sizes)
    layout = plan_stage_layout(model, model.num_layers, model.pipeline_model_parallel_layout)
    micro_batch_size = fields.integer("micro_batch", 1)
    global_batch_size = fields.optional("global_batch")
    if global_batch_size is None:
        global_batch_size = fields.integer("num_microbatches") * micro_batch_size * dp
    is_sharded = fields.switch("distributed_optimizer", default=True)
    fsdp = fields.optional("fsdp") if fields.values.get("fsdp") else None
    strategy = "no_shard" if fsdp in (None, 1) else "optim_grads_params"
    return Plan(
        model=model,
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=is_sharded,
            data_parallel_sharding_strategy=strategy,
            num_distributed_optimizer_instances=1 if strategy == "no_shard" else dp * cp // (fsdp or 1),
            overlap_grad_reduce=fields.switch("overlap_grad_reduce", default=True),
            overlap_param_gather=is_sharded and fields.switch("overlap_param_gather", default=True),
        ),
        optimizer=OptimizerConfig(params_dtype=model.params_dtype),
        parallel_sizes=sizes,
        stage_layout=layout,
        pipeline_schedule=default_schedule(pp, layout.num_chunks),
        seq_length=shape.integer("seq_length"),
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
    )


def _replicas(fields: Fields, model_ranks: int) -> tuple[int, int]:
    """Return the data-parallel size and the number of ranks; a record may leave out one of them."""
    dp, world_size = fields.optional("dp"), fields.optional("world_size")
    if dp is None:
        world_size = world_size or model_ranks
        return max(1, world_size // model_ranks), world_size
    return dp, world_size or dp * model_ranks


def _expert_tp(fields: Fields, num_ranks: int, ep: int, tp: int) -> int | None:
    """Return the expert-tensor-parallel size.

    If the record leaves it out, it is None, which means the tensor-parallel size as in Megatron-LM. It is 1 for
    Megatron Bridge recipes and for layouts in which the tensor-parallel size is not possible.
    """
    given = fields.optional("etp")
    is_recipe = recorded_implementation(fields) is MEGATRON_BRIDGE
    return 1 if given is None and (is_recipe or num_ranks % (ep * tp)) else given


def _not_a_grid(world_size: int, model_ranks: int) -> str:
    return (
        f"world_size {world_size} is not tp x pp x cp x dp, where tp x pp x cp is {model_ranks}; use a multiple of "
        f"{model_ranks} and the matching dp"
    )


def _num_experts(shape: Fields) -> int | None:
    """Return the number of experts of a layer from any of its field names, or None for a dense model."""
    return next((shape.optional(name) for name in _EXPERT_FIELDS if shape.values.get(name)), None)


def _wrong_experts(shape: Fields, sizes: ParallelSizes) -> list[str]:
    experts = _num_experts(shape)
    if experts is None:
        return [f"ep {sizes.ep} without experts; set num_experts, or use ep 1"] if sizes.ep > 1 else []
    problems = []
    if experts % sizes.ep:
        problems.append(f"num_experts {experts} is not divisible by ep {sizes.ep}; use an ep that divides it")
    width = shape.integer("moe_ffn_hidden_size")
    if width % sizes.expert_tp:
        problems.append(f"moe_ffn_hidden_size {width} is not divisible by etp {sizes.expert_tp}; use etp 1")
    if shape.integer("moe_router_topk") > experts:
        problems.append(f"moe_router_topk {shape.integer('moe_router_topk')} is more than the {experts} experts")
    return problems


def _unknown(fields: Fields, num_replicas: int) -> list[str]:
    problems = []
    shards = fields.optional("fsdp") if fields.values.get("fsdp") else None
    if shards is not None and num_replicas % shards:
        problems.append(f"fsdp {shards} does not divide the {num_replicas} ranks with the same weights; use a divisor")
    if _precision(fields) not in _PRECISIONS:
        problems.append(f"precision {fields.text('precision')} is not known; use one of {', '.join(_PRECISIONS)}")
    if fields.text("recompute", "none") not in _RECOMPUTES:
        problems.append(f"recompute {fields.text('recompute')} is not known; use one of {', '.join(_RECOMPUTES)}")
    return problems


def _wrong_texts(shape: Fields, fields: Fields) -> list[str]:
    """Return the problems of layer patterns and of recompute modules."""
    problems = []
    for name in (*_TEXT_FIELDS, "moe_layer_freq"):
        try:
            if name == "window_size" and shape.values.get(name):
                parse_window(shape.text(name))
            elif shape.values.get(name):
                parse_layer_pattern(shape.text(name), shape.integer("num_layers", most=_MOST_LAYERS))
        except ValueError as error:
            problems.append(f"{name} is {shape.text(name)[:60]!r}; {error}")
    (field,) = (each for each in dataclasses.fields(GPTConfig) if each.name == "recompute_modules")
    known = field.metadata["flag"].choices
    problems += [
        f"recompute module {name[:60]} is not known; use some of {', '.join(known)}"
        for name in _recompute_modules(fields)
        if name not in known
    ]
    if shape.values.get("q_lora_rank") and not shape.switch("multi_latent_attention", default=False):
        problems.append("q_lora_rank requires multi_latent_attention; set it to true, or omit q_lora_rank")
    return problems


def _precision(fields: Fields) -> str:
    """Return the first word of the precision; the name of an FP8 recipe may follow it."""
    words = fields.text("precision", "bf16").lower().split()
    return words[0] if words else ""


def _float8_recipe(fields: Fields) -> str:
    """Return the FP8 recipe that the precision field names."""
    words = fields.text("precision").lower()
    return next((recipe for word, recipe in _RECIPES.items() if word in words), "delayed")


def _model(fields: Fields, shape: Fields, sizes: ParallelSizes) -> GPTConfig:
    tp, pp, cp = sizes.tp, sizes.pp, sizes.cp
    experts = _num_experts(shape)
    precision, recompute = _precision(fields), fields.text("recompute", "none")
    hidden, heads, gated = (
        shape.integer("hidden_size"),
        shape.integer("num_attention_heads"),
        shape.switch("swiglu", default=False),
    )
    padded = shape.optional("padded_vocab_size")
    is_known = padded is not None and padded % tp == 0
    dropout = shape.number("dropout") or 0.0 if shape.values.get("dropout") else 0.0
    if dropout >= 1.0:
        raise shape.error("dropout", "a number of 0 or more and below 1")
    has_flash_attention = fields.switch("flash_attention", default=True)
    chunks = fields.optional("vpp")
    depth = fields.optional("layers_per_virtual_stage")
    again = recompute if recompute in ("selective", "full") else None
    more: dict[str, Any] = {name: shape.optional(name) for name in _LATENT_FIELDS if shape.values.get(name)}
    more |= {name: shape.text(name) for name in _TEXT_FIELDS if shape.values.get(name)}
    return from_fields(
        GPTConfig,
        num_layers=shape.integer("num_layers", most=_MOST_LAYERS),
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=shape.integer("ffn_hidden_size", default_ffn_hidden_size(hidden, gated)),
        kv_channels=shape.integer("head_dim", max(1, hidden // heads)),
        num_query_groups=shape.integer("num_query_groups", heads),
        vocab_size=padded if is_known and padded is not None else shape.integer("vocab_size"),
        make_vocab_size_divisible_by=1 if is_known else 128,
        max_position_embeddings=shape.integer("max_position_embeddings", shape.integer("seq_length")),
        position_embedding_type=shape.text("position_embedding", "rope"),
        normalization=shape.text("normalization", "RMSNorm"),
        swiglu=gated,
        add_bias_linear=shape.switch("linear_bias", default=False),
        add_qkv_bias=shape.switch("qkv_bias", default=False),
        untie_embeddings_and_output_weights=not shape.switch("tied_embeddings", default=False),
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attention_backend="auto" if has_flash_attention else "unfused",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1 and fields.switch("sequence_parallel", default=True),
        num_layers_per_virtual_pipeline_stage=depth,
        num_virtual_stages_per_pipeline_rank=None if depth is not None or chunks == 1 else chunks,
        account_for_embedding_in_pipeline_split=fields.switch("account_for_embedding_in_pipeline_split", default=False),
        account_for_loss_in_pipeline_split=fields.switch("account_for_loss_in_pipeline_split", default=False),
        recompute_granularity=again,
        recompute_modules=_recompute_modules(fields),
        recompute_method=_told(fields, "method", "uniform") if again == "full" else None,
        recompute_num_layers=int(_told(fields, "num-layers", "1")) if again == "full" else None,
        cpu_offloading=recompute == "cpu_offload",
        cpu_offloading_num_layers=int(_told(fields, "num-layers", "1")) if recompute == "cpu_offload" else 0,
        fp8_format="hybrid" if precision == "fp8" else None,
        fp8_recipe=_float8_recipe(fields),
        num_experts=experts,
        moe_ffn_hidden_size=shape.integer("moe_ffn_hidden_size") if experts else 0,
        moe_router_topk=shape.integer("moe_router_topk") if experts else 2,
        moe_shared_expert_intermediate_size=shape.optional("moe_shared_expert_intermediate_size") if experts else None,
        moe_layer_freq=shape.text("moe_layer_freq", "1"),
        moe_token_dispatcher_type="alltoall",
        multi_latent_attention=shape.switch("multi_latent_attention", default=False),
        qk_layernorm=shape.switch("qk_layernorm", default=False),
        mtp_num_layers=shape.integer("mtp_num_layers", most=_MOST_FURTHER)
        if shape.values.get("mtp_num_layers")
        else None,
        pipeline_model_parallel_layout=fields.text("pipeline_layout") or None,
        **more,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        fp16=precision == "fp16",
        bf16=precision in ("bf16", "fp8"),
    )


def _recompute_modules(fields: Fields) -> tuple[str, ...]:
    """Return the modules of ``--recompute-modules`` in a record's recompute description; by default core attention."""
    found = re.search(r"--recompute-modules((?:[ =]+[a-z_]+)+)", fields.text("recompute_detail"))
    return tuple(found.group(1).replace("=", " ").split()) if found else ("core_attn",)


def _told(fields: Fields, name: str, default: str) -> str:
    """Return the value of a flag in a record's description of recompute or offload."""
    found = re.search(rf"-{name}[ =](\w+)", fields.text("recompute_detail"))
    value = found.group(1) if found else default
    return value if value.isdecimal() == default.isdecimal() else default


_MIB = 2**20
_OUTCOMES = ("ok", "oom", "error")


@dataclass(frozen=True)
class EvaluatedRun:
    """A measured run and its prediction; ``memory_mib`` is of the kind that was measured."""

    run: MeasuredRun
    prediction: Prediction
    padded_vocab_size: int | None = None

    @property
    def memory_mib(self) -> float | None:
        """Return the predicted memory of the fullest GPU."""
        prediction = self.prediction
        size = prediction.tensor_bytes if self.run.shows_allocator else prediction.used_bytes
        return None if size is None else size / _MIB

    @property
    def ms_per_iter(self) -> float | None:
        """Return the predicted milliseconds of a step."""
        return None if self.prediction.time is None else 1e3 * self.prediction.time.total

    @property
    def memory_error(self) -> float | None:
        """Return the relative error of the predicted memory, or None if it is not scored."""
        measured = self.run.measured
        return _error(self.memory_mib, measured.memory_mib if measured.scores_memory else None)

    @property
    def time_error(self) -> float | None:
        """Return the relative error of the predicted time, or None if it is not scored."""
        measured = self.run.measured
        return _error(self.ms_per_iter, measured.ms_per_iter if measured.scores_time else None)

    @property
    def is_outcome_right(self) -> bool | None:
        """Return whether the predicted outcome is right, or None if the outcome is not scored."""
        measured = self.run.measured
        if not measured.scores_outcome or measured.outcome not in _OUTCOMES:
            return None
        return self.prediction.outcome == measured.outcome

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON-ready values."""
        prediction, stages = self.prediction, self.prediction.stages
        return {
            "id": self.run.id,
            "outcome": prediction.outcome,
            "memory_mib": _rounded(self.memory_mib, 1),
            "ms_per_iter": _rounded(self.ms_per_iter, 2),
            "tflops_per_gpu": _rounded(prediction.tflops, 2),
            "reason": prediction.reason,
            "parameters_by_stage": [stage.parameters for stage in stages],
            "padded_vocab_size": self.padded_vocab_size,
            "tensor_mib_by_stage": [round(stage.total / _MIB, 1) for stage in stages],
        }


def evaluate(
    runs: Iterable[MeasuredRun],
    implementation: Implementation | None = None,
    gpu: Gpu | None = None,
    platform: Platform = HOPPER_MACHINES,
    left_out: list[DataError] | None = None,
) -> Sequence[EvaluatedRun]:
    """Predict every run.

    ``implementation`` and ``gpu`` are by default those of each record. If ``left_out`` is given, records that do not
    describe a training run are skipped and their errors are added to it.

    Raises:
        DataError: a record's field is missing or of another type, and ``left_out`` is not given.
    """
    evaluated = []
    for run in runs:
        with leaving_out(left_out):
            evaluated.append(_evaluate(run, implementation or recorded_implementation(run.fields), gpu, platform))
    return evaluated


def describe_errors(evaluated: Sequence[EvaluatedRun]) -> Sequence[str]:
    """Return a table of errors by model and overall, and the measured and predicted fastest layout of each model."""
    models = list(dict.fromkeys(each.run.model_name for each in evaluated))
    by_model = {name: [each for each in evaluated if each.run.model_name == name] for name in models}
    width = max(len(name) for name in (*models, "overall"))
    lines = [f"{'model':{width}}  runs   memory: mean    worst     time: mean    worst   outcomes right"]
    lines += [_line(f"{name:{width}}", group) for name, group in by_model.items()]
    lines.append(_line(f"{'overall':{width}}", evaluated))
    return [*lines, *_fastest(by_model)]


def _evaluate(run: MeasuredRun, implementation: Implementation, gpu: Gpu | None, platform: Platform) -> EvaluatedRun:
    hardware = run.fields.part("hardware")
    described = hardware.text("gpu")
    usable_mib = hardware.optional("mem_total_mib")
    gpu_type = gpu or gpu_in_text(described)
    try:
        plan = recorded_plan(run.fields)
    except ConfigurationError as error:
        return EvaluatedRun(run, Prediction("error", "; ".join(error.problems)))
    usable = usable_mib * _MIB if usable_mib and gpu is None else None
    prediction = predict(plan, implementation, gpu_type, usable, platform)
    if gpu_type is None and prediction.reason is None:
        reason = (
            f"there are no built-in figures for the GPU {described[:80]!r}, so no time is predicted; select a GPU "
            "with --gpu"
        )
        prediction = Prediction("ok", reason, prediction.stages, prediction.used_bytes)
    return EvaluatedRun(run, prediction, plan.model.padded_vocab_size)


def _line(name: str, group: Sequence[EvaluatedRun]) -> str:
    memory = _mean_and_worst(each.memory_error for each in group)
    time = _mean_and_worst(each.time_error for each in group)
    outcomes = [each.is_outcome_right for each in group if each.is_outcome_right is not None]
    right = f"{sum(outcomes)} of {len(outcomes)}" if outcomes else "-"
    return f"{name}  {len(group):4}   {memory}        {time}   {right}"


def _mean_and_worst(errors: Iterable[float | None]) -> str:
    sizes = [abs(error) for error in errors if error is not None]
    if not sizes:
        return f"{'-':>12} {'-':>8}"
    return f"{100 * sum(sizes) / len(sizes):11.2f}% {100 * max(sizes):7.2f}%"


def _fastest(by_model: Mapping[str, Sequence[EvaluatedRun]]) -> Iterable[str]:
    """Yield a line per model: the run with the lowest GPU time per sample, as measured and as predicted."""
    for name, group in by_model.items():
        times = {each.run.id: each for each in group if each.time_error is not None}
        if len(times) > 1:
            measured = min(times, key=lambda key: _gpu_time(times[key], times[key].run.measured.ms_per_iter))
            predicted = min(times, key=lambda key: _gpu_time(times[key], times[key].ms_per_iter))
            said = "as predicted" if measured == predicted else f"but {predicted} was predicted"
            yield f"fastest of {name}: {measured}, {said}"


def _gpu_time(each: EvaluatedRun, milliseconds: float | None) -> float:
    """Return GPU-milliseconds per sample."""
    fields = each.run.fields
    assert milliseconds is not None, "only runs with a time are compared"
    return milliseconds * fields.integer("world_size", 1) / fields.integer("global_batch", 1)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
