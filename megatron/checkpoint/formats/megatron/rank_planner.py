"""Plan the files of every model-parallel rank: Megatron-LM's keys and the values of each tensor."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.formats.megatron.arguments import (
    PROGRESS,
    TRAIN_DATA,
    arguments_of_config,
    check_expert_places,
    derived_arguments,
    plain_arguments,
)
from megatron.checkpoint.formats.megatron.common_state import stored_schedule
from megatron.checkpoint.formats.megatron.parameter_keys import (
    fused_key,
    grouped_key,
    has_fused_norms,
    mamba_model_key,
    module_of,
)
from megatron.checkpoint.formats.megatron.rank_files import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    RankFile,
    expert_places,
    is_megatron_torch,
    open_rank_files,
    rank_folder_name,
)
from megatron.checkpoint.formats.megatron.stage_parameters import (
    WORD_EMBEDDING,
    LocalParameter,
    StageDescriber,
    in_fused_order,
    in_grouped_order,
)
from megatron.checkpoint.formats.megatron.stored_optimizer import (
    alone_in_bucket,
    flat_bucket_size,
    in_optimizer_order,
    optimized_apart,
    plan_flat_buffer,
)
from megatron.checkpoint.formats.megatron.torch_file_reader import LazyTensor, Record, StoredArray, TorchFile
from megatron.checkpoint.formats.megatron.torch_file_writer import (
    PlannedTensor,
    TorchFilePlan,
    given_tensor,
    namespace,
    plan_torch_file,
)
from megatron.core.config_base import config_from_dict
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig, flags_without_argument
from megatron.core.optimizer import OptimizerConfig, ScheduleConfig, learning_rate, weight_decay
from megatron.core.pipeline_parallel import plan_stage_layout
from megatron.core.precision import dtype_from_name

CHECKPOINT_VERSION = 3.0
FLOAT8_SCALING = "float8_scaling"
"""Key of the state of FP8 delayed scaling, in a ``common`` section and in the files."""
_LINEAR = (
    *("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer", "eh_proj"),
    *("in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
)

_OF_ONE_EXPERT = re.compile(r"\.local_experts\.\d+")

DtypeOf = Callable[[str], torch.dtype]
"""Maps the native name of a tensor to its dtype."""


@dataclass(frozen=True, eq=False)
class Slot:
    """Range of a planned tensor, from element ``start``, for a parameter or a tensor of its optimizer state.

    ``name`` is the native name of the global tensor that provides the values.
    """

    tensor: PlannedTensor
    start: int
    name: str
    parameter: LocalParameter


@dataclass(frozen=True, eq=False)
class PlannedValue:
    """Value of one file that contains planned tensors, and the slots that fill them."""

    value: Any
    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerTerms:
    """Values in the optimizer's files other than tensors.

    ``param_groups`` differ in their weight decay multiplier. ``is_half`` states that the model has half precision and
    float32 main parameters. ``grad_scaler`` is None without a loss scale.
    """

    config: OptimizerConfig
    learning_rate: float
    weight_decay: float
    num_steps: int
    is_half: bool
    grad_scaler: Mapping[str, Any] | None

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the names of the optimizer's state tensors for each parameter."""
        if self.config.optimizer == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.config.sgd_momentum else ()


@dataclass(frozen=True)
class Experts:
    """Properties of the experts' separate optimizer."""

    has_bias: bool


def model_state(
    parameters: Sequence[LocalParameter],
    dtype_of: DtypeOf,
    fused_norms: bool,
    groups_experts: bool = False,
    of_mamba_model: bool = False,
) -> PlannedValue:
    """Plan the state dict of one model chunk. Linear layers have an empty ``_extra_state``."""
    modules = {module_of(parameter.key) for parameter in parameters} if fused_norms else set()
    state: OrderedDict[str, PlannedTensor | None] = OrderedDict()
    slots = []
    for number, parameter in enumerate(parameters):
        module, _, _ = parameter.key.rpartition(".")
        name = f"model.{parameter.name}"
        tensor = PlannedTensor(dtype_of(name), parameter.stored_shape)
        key = fused_key(parameter.key, modules)
        if of_mamba_model:
            key = mamba_model_key(key)
        state[grouped_key(key) if groups_experts else key] = tensor
        slots.append(Slot(tensor, 0, name, parameter))
        following = parameters[number + 1].key if number + 1 < len(parameters) else ""
        if module.rpartition(".")[2] in _LINEAR and not following.startswith(f"{module}."):
            state[_OF_ONE_EXPERT.sub("", module) + "._extra_state" if groups_experts else f"{module}._extra_state"] = (
                None
            )
    if any(p.key == "decoder.final_layernorm.weight" for p in parameters):
        # The module exists even if it shares the embedding's weight.
        state.setdefault("output_layer._extra_state", None)
    return PlannedValue(state, tuple(slots))


def optimizer_state(
    chunks: Sequence[Sequence[LocalParameter]], terms: OptimizerTerms, dtype_of: DtypeOf, experts: Experts | None = None
) -> PlannedValue:
    """Plan a rank's optimizer state by parameter; ``experts`` is set for the experts' own optimizer."""
    ordered = in_optimizer_order(chunks)
    groups = param_groups(terms, experts)
    state: dict[int, dict[str, PlannedTensor]] = {}
    slots: list[Slot] = []

    def planned(kind: str, parameter: LocalParameter) -> PlannedTensor:
        name = f"optimizer.{kind}.{parameter.name}"
        tensor = PlannedTensor(dtype_of(name), parameter.stored_shape)
        slots.append(Slot(tensor, 0, name, parameter))
        return tensor

    for number, parameter in enumerate(parameter for group in ordered for parameter in group):
        entry: dict[str, PlannedTensor] = {}
        if terms.config.optimizer == "adam":
            entry["step"] = given_tensor(torch.tensor(float(terms.num_steps)))
        entry |= {kind: planned(kind, parameter) for kind in terms.state_names}
        if entry:
            state[number] = entry
    first = 0
    for group, parameters in zip(groups, ordered):
        group["params"] = list(range(first, first + len(parameters)))
        first += len(parameters)
    inner: dict[str, Any] = {"state": state, "param_groups": groups}
    if not terms.is_half:
        return PlannedValue(inner, tuple(slots))
    value: dict[str, Any] = {"optimizer": inner, **loss_scale_entry(terms)}
    mains = [[planned("main_param", parameter) for parameter in group] for group in ordered]
    value["fp32_from_fp16_params"] = mains[: len(groups)]
    return PlannedValue(value, tuple(slots))


def distributed_optimizer_state(terms: OptimizerTerms, experts: Experts | None = None) -> dict[str, Any]:
    """Return the distributed optimizer's part of the model file; its tensors are in a separate file."""
    groups = param_groups(terms, experts)
    for group in groups:
        group["step"] = float(terms.num_steps)
    return {"optimizer": {"param_groups": groups}, **loss_scale_entry(terms)}


def flat_optimizer_state(
    chunks: Sequence[Sequence[LocalParameter]],
    bucket_sizes: Sequence[int | None],
    terms: OptimizerTerms,
    buffer_dtypes: tuple[torch.dtype, torch.dtype],
) -> PlannedValue:
    """Plan the distributed optimizer's own file: flat buffers of main parameters and moments per chunk.

    ``buffer_dtypes`` are the dtypes of the parameters and of their gradients, which Megatron-LM uses as the buffers'
    key.
    """
    value: dict[Any, Any] = {"buckets_coalesced": True}
    slots = []
    for number, (parameters, bucket_size) in enumerate(zip(chunks, bucket_sizes, strict=True)):
        if not parameters:
            continue  # no experts
        sizes = [parameter.num_elements for parameter in parameters]
        layout = plan_flat_buffer(sizes, bucket_size, alone_in_bucket(parameters))
        buffers: dict[str, Any] = {}
        for name in ("param", "exp_avg", "exp_avg_sq"):
            tensor = buffers[name] = PlannedTensor(torch.float32, (layout.num_elements,))
            prefix = f"optimizer.{name}." if name != "param" else "optimizer.main_param." if terms.is_half else "model."
            for parameter, start in zip(parameters, layout.starts):
                slots.append(Slot(tensor, start, prefix + parameter.name, parameter))
        buffers["numel_unpadded"] = layout.num_elements
        value[number] = {buffer_dtypes: buffers}
    return PlannedValue(value, tuple(slots))


def rank_value(
    arguments: object,
    iteration: int,
    models: Sequence[Any],
    optimizer: Any,
    scheduler: Mapping[str, Any] | None,
    rng_state: Any,
    floating_point_operations: float,
) -> dict[str, Any]:
    """Return the content of a rank's ``model_optim_rng.pt``; entries that are None are left out."""
    value: dict[str, Any] = {"args": arguments, "checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration}
    value |= {"model": models[0]} if len(models) == 1 else {f"model{n}": model for n, model in enumerate(models)}
    rest = {"optimizer": optimizer, "opt_param_scheduler": scheduler, "rng_state": rng_state}
    value |= {name: item for name, item in rest.items() if item is not None}
    value["num_floating_point_operations_so_far"] = floating_point_operations
    return value


def float8_entry(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with the state of FP8 delayed scaling; empty without it. Megatron-LM ignores this entry.

    Megatron-LM stores this state per rank in Transformer Engine's own form.
    """
    tensors = common.get(FLOAT8_SCALING) or {}
    return {FLOAT8_SCALING: {name: given_tensor(values) for name, values in tensors.items()}} if tensors else {}


def param_groups(terms: OptimizerTerms, experts: Experts | None = None) -> list[dict[str, Any]]:
    """Return the optimizer's groups with and without weight decay, without their parameters.

    Experts without biases have only the first group.
    """
    multipliers = (1.0,) if experts is not None and not experts.has_bias else (1.0, 0.0)
    return [_param_group(terms, multiplier) | {"is_expert_parallel": experts is not None} for multiplier in multipliers]


def _param_group(terms: OptimizerTerms, multiplier: float) -> dict[str, Any]:
    config = terms.config
    weight_decay = {"weight_decay": terms.weight_decay * multiplier}
    common = {
        "is_expert_parallel": False,
        "default_config": True,
        "wd_mult": multiplier,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "lr": terms.learning_rate,
    }
    if config.optimizer == "sgd":
        momentum = {"momentum": config.sgd_momentum, "dampening": 0.0, **weight_decay, "nesterov": False}
        return {**common, **momentum, "maximize": False, "foreach": None, "differentiable": False, "fused": None}
    rule: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, **weight_decay}
    switches = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    return {**common, **rule, **switches, "fused": None, "decoupled_weight_decay": True}


def loss_scale_entry(terms: OptimizerTerms) -> dict[str, Any]:
    """Return the loss scale entry; Megatron-LM stores the scale as a tensor."""
    if terms.grad_scaler is None:
        return {}
    state = dict(terms.grad_scaler)
    if "scale" in state:
        state["scale"] = given_tensor(torch.tensor([state["scale"]], dtype=torch.float32))
    return {"grad_scaler": state}


_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class RankExtras:
    """Values of a rank's file that no other format has: ``args`` and the random number generator state."""

    arguments: Mapping[str, Any]
    rng_state: Any = None


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """Plan of a file and the slots that fill its tensors."""

    file: TorchFilePlan
    slots: tuple[Slot, ...]


class RankPlanner:
    """Plan the files of any rank for the layout in ``common``, the section of a native index.

    ``dtype_of`` returns the dtype of a tensor by native name. ``padded_vocab_size`` and ``fused_norms`` (Transformer
    Engine's names of norms) are those of the source checkpoint if it has this format. ``groups_experts`` gives experts
    Transformer Engine's names.

    Raises:
        ConfigurationError: Megatron-LM's arguments cannot describe the model.
    """

    def __init__(
        self,
        common: Mapping[str, Any],
        dtype_of: Callable[[str], torch.dtype],
        *,
        padded_vocab_size: int | None = None,
        fused_norms: bool = False,
        groups_experts: bool = False,
    ) -> None:
        self.common = common
        self.model = config_from_dict(GPTConfig, common["config"]["model"])
        if flags := flags_without_argument(self.model):
            raise ConfigurationError(f"Megatron has no arguments for {', '.join(flags)}; use the native format")
        self.tp, self.pp = self.model.tensor_model_parallel_size, self.model.pipeline_model_parallel_size
        self.stages = plan_stage_layout(self.model, self.model.num_layers, self.model.pipeline_model_parallel_layout)
        self.padded_vocab_size = padded_vocab_size or self.model.padded_vocab_size
        # Megatron-LM has hybrid models with Transformer Engine's layers only, and a pattern with grouped experts only.
        self.has_pattern = self.model.hybrid.hybrid_override_pattern is not None
        self.fused_norms = fused_norms or self.model.hybrid.is_hybrid
        self.groups_experts = groups_experts or self.has_pattern
        self._dtype_of = dtype_of
        narrow = (self.model.mla.q_lora_rank or 0, self.model.mla.kv_lora_rank + self.model.mla.qk_pos_emb_head_dim)
        cuts_narrow = self.model.transformer_impl == "local" and all(rows % self.tp == 0 for rows in narrow)
        self._describer = StageDescriber(self.model, self.padded_vocab_size, cuts_narrow=cuts_narrow)
        self.ep = self.model.expert_model_parallel_size
        self._schedule = None if common["scheduler"] is None else stored_schedule(common["scheduler"])
        self.terms = None if common["optimizer"] is None else self._optimizer_terms()

    @property
    def expert_places(self) -> list[tuple[int, int]]:
        """Return (TP rank, EP rank) of every file of a stage in the ``torch`` format.

        Raises:
            ConfigurationError: this format does not support the layout of the experts.
        """
        check_expert_places(self.model)
        return expert_places(self.tp, self.ep, self.model.parallel_sizes.expert_tp)

    def plan_rank(
        self, folder: Path, tp_rank: int, pp_rank: int, iteration: int, extras: RankExtras, ep_rank: int = 0
    ) -> tuple[PlannedFile, ...]:
        """Plan a rank's file, and the distributed optimizer's file if there is one."""
        chunks = self.parameters(tp_rank, pp_rank, ep_rank)
        arguments = self.arguments(extras.arguments)
        models = [
            model_state(parameters, self._dtype_of, self.fused_norms, self.groups_experts, self.has_pattern)
            for parameters in chunks
        ]
        slots = [slot for model in models for slot in model.slots]
        has_first = ep_rank == min(e for t, e in self.expert_places if t == tp_rank)
        parts = list(self._optimizer_parts(chunks, arguments, pp_rank))
        optimizers = [part.state for part in parts]
        flats = [part.flat if has_first or part.is_experts else None for part in parts]
        slots += (slot for part in parts for slot in part.slots)
        value = rank_value(
            namespace(arguments),
            iteration,
            [model.value for model in models],
            _alone(optimizers),
            self._schedule,
            extras.rng_state,
            float(self.common["progress"]["floating_point_operations_so_far"]),
        )
        value |= float8_entry(self.common)
        rank_folder = folder / rank_folder_name(tp_rank, pp_rank, self.pp, ep_rank, self.ep)
        files = [PlannedFile(plan_torch_file(rank_folder / MODEL_FILE, value), tuple(slots))]
        if any(flat is not None for flat in flats):
            value = _alone([None if flat is None else flat.value for flat in flats])
            flat_slots = tuple(slot for flat in flats if flat is not None for slot in flat.slots)
            files.append(PlannedFile(plan_torch_file(rank_folder / OPTIMIZER_FILE, value), flat_slots))
        return tuple(files)

    def _optimizer_parts(
        self, chunks: Sequence[Sequence[LocalParameter]], arguments: Mapping[str, Any], pp_rank: int
    ) -> Iterator[_OptimizerPart]:
        """Plan each optimizer of a rank; with expert parallelism the experts have a separate optimizer."""
        if self.terms is None:
            return
        has_own = self.ep > 1
        is_distributed = self.common["config"]["ddp"].get("use_distributed_optimizer")
        sizes = [
            flat_bucket_size(arguments, pp_rank, number, sum(parameter.num_elements for parameter in parameters))
            for number, parameters in enumerate(chunks)
        ]
        for number, own in enumerate(optimized_apart(chunks, has_own)):
            experts = Experts(self.model.add_bias_linear) if number else None
            if is_distributed:
                flat = flat_optimizer_state(own, sizes, self.terms, self._buffer_dtypes(arguments))
                yield _OptimizerPart(distributed_optimizer_state(self.terms, experts), (), flat, experts is not None)
            else:
                planned = optimizer_state(own, self.terms, self._dtype_of, experts)
                yield _OptimizerPart(planned.value, planned.slots, None, experts is not None)

    def parameters(self, tp_rank: int, pp_rank: int, ep_rank: int = 0) -> list[Sequence[LocalParameter]]:
        """Return the parameters of each model chunk of a rank, in file order."""
        chunks: list[Sequence[LocalParameter]] = []
        for contents in self.stages.chunks(pp_rank):
            parameters = self._describer.parameters(
                tp_rank,
                contents.layer_numbers,
                has_embedding=contents.has_embedding,
                has_loss=contents.has_loss,
                ep_rank=ep_rank,
            )
            if self.groups_experts:
                parameters = in_grouped_order(parameters)
            chunks.append(in_fused_order(parameters) if self.fused_norms else parameters)
        return chunks

    def arguments(self, carried: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of ``args``, including those of ``carried`` that the run does not determine."""
        config, progress, layout = self.common["config"], self.common["progress"], self.common["layout"]
        half = self.model.params_dtype == "bfloat16" and not config["ddp"].get("grad_reduce_in_bf16", False)
        derived = derived_arguments(
            self.model,
            config["data"].get("seq_length", 0),
            self.stages.num_chunks,
            layout["data_parallel_size"],
            self.padded_vocab_size,
        )
        defaults = {"accumulate_allreduce_grads_in_fp32": half}
        if self.model.moe.num_experts is not None:
            derived["moe_grouped_gemm"] = self.groups_experts
        counts = {theirs: progress[ours] for ours, theirs in PROGRESS.items()}
        carried = {name: value for name, value in carried.items() if name != TRAIN_DATA}
        if TRAIN_DATA in progress:
            counts[TRAIN_DATA] = json.dumps(progress[TRAIN_DATA])
        return defaults | carried | arguments_of_config(config) | derived | counts

    def _buffer_dtypes(self, arguments: Mapping[str, Any]) -> tuple[torch.dtype, torch.dtype]:
        dtype = dtype_from_name(self.model.params_dtype)
        return dtype, torch.float32 if arguments["accumulate_allreduce_grads_in_fp32"] else dtype

    def _optimizer_terms(self) -> OptimizerTerms:
        config = config_from_dict(OptimizerConfig, self.common["config"]["optimizer"])
        if config.optimizer not in ("adam", "sgd"):
            raise ConfigurationError(
                f"Megatron's files cannot store the state of --optimizer {config.optimizer}; use the native "
                "format, or omit the state with --no-save-optim"
            )
        scheduler, state = self.common["scheduler"], self.common["optimizer"]
        rate, decay = config.lr, config.weight_decay
        if scheduler is not None:
            schedule = config_from_dict(ScheduleConfig, scheduler["schedule"])
            rate, decay = (f(schedule, scheduler["num_samples"]) for f in (learning_rate, weight_decay))
        is_half = dtype_from_name(self.model.params_dtype) in _HALVES
        has_scaler = self.model.params_dtype == "float16" or config.loss_scale is not None
        return OptimizerTerms(
            config=config,
            learning_rate=rate,
            weight_decay=decay,
            num_steps=state["num_steps"],
            is_half=is_half,
            grad_scaler=state["grad_scaler"] if has_scaler else None,
        )


@dataclass(frozen=True, eq=False)
class _OptimizerPart:
    """State of one optimizer of a rank in the model file and in its own file."""

    state: Any
    slots: tuple[Slot, ...]
    flat: PlannedValue | None
    is_experts: bool


def _alone(values: Sequence[Any]) -> Any:
    """Return optimizers as Megatron-LM stores them: a list, a single one by itself, or None for none."""
    return list(values) if len(values) > 1 else values[0] if values else None


@dataclass(frozen=True, kw_only=True)
class CarriedValues:
    """Layout of a checkpoint's files, and each rank's own values by (TP rank, PP rank).

    Empty if the checkpoint was in another format.
    """

    num_chunks: int = 0
    padded_vocab_size: int = 0
    fused_norms: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[tuple[int, int], RankExtras] = field(default_factory=dict)

    def fits(self, tp: int, pp: int, num_chunks: int) -> bool:
        """Return whether a layout equals the files' layout."""
        grid = {(t, p) for t in range(tp) for p in range(pp)}
        return self.ranks.keys() == grid and self.num_chunks == num_chunks


def carried_from(folder: Path) -> CarriedValues:
    """Read the values to carry over from a folder's files; empty if it is in another format."""
    if not is_megatron_torch(folder):
        return CarriedValues()
    ranks = open_rank_files(folder)
    try:
        return carried_from_ranks(ranks)
    finally:
        for rank in ranks.values():
            rank.close()


def carried_from_ranks(ranks: Mapping[tuple[int, int], RankFile]) -> CarriedValues:
    """Read the values to carry over from open files."""
    first = ranks[0, 0]
    state = first.file.value
    tp = 1 + max(tp_rank for tp_rank, _ in ranks)
    return CarriedValues(
        num_chunks=len(first.chunks),
        padded_vocab_size=first.chunks[0][WORD_EMBEDDING].shape[0] * tp,
        fused_norms=has_fused_norms(state.get("model", state.get("model0", {}))),
        arguments=plain_arguments(first.arguments),
        ranks={
            place: RankExtras(
                arguments=plain_arguments(rank.arguments),
                rng_state=as_values(rank.file.value.get("rng_state"), rank.file),
            )
            for place, rank in ranks.items()
        },
    )


def as_values(value: Any, file: TorchFile) -> Any:
    """Return a small value of a file with its tensors and arrays loaded; unsupported objects become None."""
    if isinstance(value, LazyTensor):
        return given_tensor(file.view(value).clone())
    if isinstance(value, StoredArray):
        return np.frombuffer(value.data, np.dtype(value.dtype)).reshape(value.shape).copy()
    if isinstance(value, Mapping):
        return {key: as_values(item, file) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_values(item, file) for item in value)
    return None if isinstance(value, Record) else value
