"""How a model is sharded over processes, and the precision of its parameters and matmuls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag, idle_with
from megatron.core.errors import choices

Grid = Mapping[str, int]
"""One factorization of all ranks: the size of each axis, from the slowest to the fastest varying."""

Place = Mapping[str, int]
"""Coordinates of a rank in a grid, one per axis."""


def place_of(grid: Grid, rank: int) -> dict[str, int]:
    """Return the coordinates of a rank, axis by axis in the order of the grid."""
    place = {}
    for axis in reversed(tuple(grid)):
        rank, place[axis] = divmod(rank, grid[axis])
    return {axis: place[axis] for axis in grid}


def slice_ranks(grid: Grid, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` only along ``axes``, in grid order.

    The cost scales with the size of the slice, not with the world size.
    """
    strides, stride = {}, 1
    for axis in reversed(tuple(grid)):
        strides[axis] = stride
        stride *= grid[axis]
    base = rank - sum(rank // strides[axis] % grid[axis] * strides[axis] for axis in axes)
    ranks = [base]
    for axis in grid:
        if axis in axes:
            ranks = [r + i * strides[axis] for r in ranks for i in range(grid[axis])]
    return tuple(ranks)


def all_slices(grid: Grid, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Return all slices of a grid along ``axes``, in the order of their first ranks."""
    return list(dict.fromkeys(slice_ranks(grid, axes, rank) for rank in range(math.prod(grid.values()))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Size of every axis of the grid, from the slowest to the fastest varying.

    Neighboring ranks share a tensor-parallel group. One copy of the model takes ``pp * cp * tp`` ranks.

    Experts have a separate factorization of the ``dp * cp * tp`` ranks of a stage: ``ep`` of them hold different
    experts, and each expert is sharded over ``etp`` ranks (None: same as ``tp``). The remaining factor is the number of
    expert replicas.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks over which each expert is sharded."""
        return self.tp if self.etp is None else self.etp

    @property
    def num_expert_replicas(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)

    @property
    def num_copies_apart(self) -> int:
        """Return the number of disjoint parts of a stage's ranks that each hold whole copies, including experts.

        Data-parallel copies whose ranks share experts are in the same part.
        """
        copy, experts = self.cp * self.tp, self.ep * self.expert_tp
        return self.dp * copy // math.lcm(copy, experts)

    @property
    def has_expert_grid(self) -> bool:
        """Return whether experts are distributed over other ranks than the rest of the model."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def expert_grid(self) -> Grid:
        """Return the sizes of the axes along which experts are spread, from the slowest to the fastest varying."""
        return {"pp": self.pp, "edp": self.num_expert_replicas, "ep": self.ep, "etp": self.expert_tp}

    @property
    def grid(self) -> Grid:
        """Return the sizes by axis."""
        return {axis: getattr(self, axis) for axis in GRID_AXES}

    @property
    def world_size(self) -> int:
        return self.size_of(GRID_AXES)

    @property
    def num_replicas(self) -> int:
        """Return the number of ranks that hold the same weights: ``dp * cp``."""
        return self.dp * self.cp

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks in a slice along ``axes``."""
        return math.prod(getattr(self, axis) for axis in axes)

    def place(self, rank: int = 0) -> Place:
        return place_of(self.grid, rank)

    def expert_place(self, rank: int = 0) -> dict[str, int]:
        """Return a rank's coordinates in the expert grid of a stage; empty if experts use the same grid as the rest."""
        if not self.has_expert_grid:
            return {}
        place = place_of(self.expert_grid, rank)
        return {axis: place[axis] for axis in ("edp", "ep", "etp")}

    def in_world(self, world_size: int) -> ParallelSizes:
        """Return the same model layout for a world size; ``dp`` becomes the number of whole copies."""
        copy = self.pp * self.cp * self.tp
        # A search calls this tens of thousands of times: `dataclasses.replace` is slower.
        return ParallelSizes(
            tp=self.tp, pp=self.pp, cp=self.cp, dp=world_size // max(copy, 1), ep=self.ep, etp=self.etp
        )

    def problems(self, world_size: int, num_experts: int = 0) -> list[str]:
        """Return an error message, if any, for a grid that does not have exactly ``world_size`` ranks.

        The suggested expert-parallel sizes are those that divide ``num_experts``.
        """
        if self.world_size == world_size:
            return self._expert_problems(num_experts)
        copy = dataclasses.replace(self, dp=1).world_size
        return [
            f"world size {world_size} is not divisible by tensor({self.tp}) x pipeline({self.pp}) x "
            f"context({self.cp}) = {copy}; "
            "change --tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
            f"or the number of processes (multiples of {copy} work)"
        ]

    def _expert_problems(self, num_experts: int) -> list[str]:
        stage, experts = self.dp * self.cp * self.tp, self.ep * self.expert_tp
        if stage % max(experts, 1) == 0:
            return []
        sizes = [
            n for n in range(1, stage // self.expert_tp + 1) if stage % (n * self.expert_tp) == num_experts % n == 0
        ]
        works = f"expert-parallel sizes that work: {choices(sizes)}"
        if not sizes:
            sizes = [n for n in range(1, stage + 1) if stage % n == 0]
            works = f"expert-tensor-parallel sizes that work: {choices(sizes)}"
        return [
            f"the {stage} ranks of a pipeline stage, data({self.dp}) x context({self.cp}) x tensor({self.tp}), are not "
            f"divisible by expert({self.ep}) x expert-tensor({self.expert_tp}) = {experts}; change "
            f"--expert-model-parallel-size or --expert-tensor-parallel-size ({works})"
        ]

    def model_fields(self) -> dict[str, Any]:
        """Return the model configuration fields that set the sharding of one copy."""
        dense = {name: getattr(self, axis) for axis, name in SIZE_NAMES.items() if name in MODEL_SIZE_NAMES}
        return dense | {name: getattr(self, axis) for axis, name in EXPERT_SIZE_NAMES.items()}

    def record(self) -> dict[str, int]:
        """Return the layout as recorded in a checkpoint."""
        sizes = {name: getattr(self, axis) for axis, name in SIZE_NAMES.items()} | {"world_size": self.world_size}
        if self.has_expert_grid:
            sizes |= dict(zip(EXPERT_SIZE_NAMES.values(), (self.ep, self.expert_tp)))
        return sizes

    def describe(self) -> str:
        """Format every size on one line."""
        words = {axis: name.removesuffix("_size").replace("_", "-") for axis, name in SIZE_NAMES.items()}
        text = ", ".join(f"{word} size: {getattr(self, axis)}" for axis, word in words.items())
        if self.has_expert_grid:
            text += f", expert-model-parallel size: {self.ep}, expert-tensor-parallel size: {self.expert_tp}"
        return text


ONE_RANK = ParallelSizes()
"""The grid of a model that is not sharded."""

GRID_AXES: tuple[str, ...] = ("pp", "dp", "cp", "tp")
"""The axes in grid order."""

SIZE_NAMES: Mapping[str, str] = {
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
"""The name of each axis's size in configurations and checkpoints."""

EXPERT_SIZE_NAMES: Mapping[str, str] = {"ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
"""The names of the sizes of the expert grid."""

MODEL_SIZE_NAMES: tuple[str, ...] = tuple(name for axis, name in SIZE_NAMES.items() if axis != "dp")
"""The sizes that a model configuration has; the data-parallel size follows from the world size."""


ELEMENT_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, by name of the dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config, in_args=True):
    """Parallel layout, shared by all layers.

    ``params_dtype`` is a torch dtype by name; ``fp16`` and ``bf16`` set it if one of them is enabled.
    """

    tensor_model_parallel_size: int = flag(1, role="layout", bounds=POSITIVE)
    """Number of tensor-parallel ranks, over which each layer's matrices are sharded."""
    pipeline_model_parallel_size: int = flag(1, role="layout", bounds=POSITIVE)
    """Number of pipeline stages, over which the layers are split."""
    context_parallel_size: int = flag(1, role="layout", bounds=POSITIVE)
    """Number of context-parallel ranks, over which each sequence is sharded."""
    expert_model_parallel_size: int = flag(1, role="layout", bounds=POSITIVE, needs="num_experts", in_args=False)
    """Number of data-, context- and tensor-parallel ranks over which a layer's experts are distributed."""
    expert_tensor_parallel_size: int | None = flag(
        None, role="layout", bounds=POSITIVE, needs="num_experts", in_args=False
    )
    """Ranks over which each expert is sharded; by default the tensor-parallel size."""
    sequence_parallel: bool = flag(False, role="layout")
    """Shard activations outside the matmuls along the sequence over tensor-parallel ranks."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, role="layout")
    """Layers per virtual pipeline stage; enables the interleaved schedule."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, role="layout")
    """Virtual stages per pipeline rank; enables the interleaved schedule."""
    decoder_first_pipeline_num_layers: int | None = flag(None, role="layout")
    """Layers on the first pipeline stage, for an uneven split."""
    decoder_last_pipeline_num_layers: int | None = flag(None, role="layout")
    """Layers on the last pipeline stage, for an uneven split."""
    account_for_embedding_in_pipeline_split: bool = flag(
        False, role="layout", idle=idle_with("pipeline_model_parallel_size", 1)
    )
    """Count the embedding as a layer in the pipeline split."""
    account_for_loss_in_pipeline_split: bool = flag(
        False, role="layout", idle=idle_with("pipeline_model_parallel_size", 1)
    )
    """Count the output layer and the loss as a layer in the pipeline split."""
    pipeline_model_parallel_layout: str | None = flag(None, metavar="LAYOUT", role="layout")
    """Layers per pipeline stage: E embedding, t layer, m MTP module, L loss, | between stages: Et*3|(tt|)*2tL. MTP
    modules are always on the stage of the loss."""
    pipeline_schedule: str | None = flag(
        None, choices=("1f1b", "interleaved", "zero-bubble"), role="layout", in_args=False
    )
    """Schedule: 1F1B, interleaved with virtual stages, or zero-bubble (ZB-H1, splits the backward pass); by default set
    by the stages."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None, role="layout", in_args=False, idle=idle_with("pipeline_model_parallel_size", 1)
    )
    """Consecutive micro-batches per virtual stage."""
    overlap_p2p_communication: bool = flag(True, negative="--no-overlap-p2p-communication", role="run", in_args=False)
    """Overlap messages between pipeline stages with compute. Off: wait for each message between pipeline stages."""
    delay_wgrad_compute: bool = flag(False, role="run", in_args=False)
    """Compute a micro-batch's weight gradients after its input gradient is sent to the previous stage."""
    defer_embedding_wgrad_compute: bool = flag(False, role="run", in_args=False)
    """Compute the output layer's weight gradients after the last stage's passes."""
    wgrad_deferral_limit: int = flag(
        0, role="run", in_args=False, bounds=NOT_NEGATIVE, where=("defer_embedding_wgrad_compute", True)
    )
    """Last micro-batches to defer the output layer's weight gradients for; 0: all."""
    cp_comm_type: tuple[str, ...] = flag(
        ("p2p",), nargs="+", role="layout", in_args=False, idle=idle_with("context_parallel_size", 1)
    )
    """Exchange of keys and values: p2p, all_gather, a2a or a2a+p2p; one for all layers, or one per layer."""
    recurrent_cp_comm_type: str = flag(
        "a2a", choices=("a2a", "all_gather"), role="layout", in_args=False, idle=idle_with("context_parallel_size", 1)
    )
    """Exchange of recurrent layers under context parallelism: a2a shards their heads; all_gather gathers the states of
    the sequence's parts, at any number of heads."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag((), nargs="+", role="layout", in_args=False)
    """For a2a+p2p: number of neighboring ranks that share heads by all-to-all, and number of such groups in a ring."""
    tp_comm_overlap: bool = flag(False, role="run", in_args=False)
    """With sequence parallelism, overlap the communication of linear layers with their GEMMs in chunks."""
    tp_comm_overlap_ag: bool = flag(
        True,
        negative="--disable-tp-comm-overlap-ag",
        aliases=("--disable-tp-comm-split-ag",),
        role="run",
        in_args=False,
        where=("tp_comm_overlap", True),
    )
    """All-gather inputs of column-parallel layers, and output gradients of row-parallel layers, in chunks. Off:
    all-gather column-parallel inputs, and row-parallel output gradients, before the GEMM."""
    tp_comm_overlap_rs: bool = flag(
        True,
        negative="--disable-tp-comm-overlap-rs",
        aliases=("--disable-tp-comm-split-rs",),
        role="run",
        in_args=False,
        where=("tp_comm_overlap", True),
    )
    """Reduce-scatter the outputs of row-parallel layers in chunks. Off: do not overlap this
    reduce-scatter with the GEMM."""
    tp_comm_overlap_rs_dgrad: bool = flag(False, role="run", in_args=False, where=("tp_comm_overlap", True))
    """Reduce-scatter column-parallel input gradients in chunks during the dgrad GEMM, not as a whole during the wgrad
    GEMM."""
    tp_comm_bulk_dgrad: bool = flag(
        True, negative="--disable-tp-comm-bulk-dgrad", role="run", in_args=False, where=("tp_comm_overlap", True)
    )
    """All-gather inputs of column-parallel layers again during the dgrad GEMM. Off: all-gather column-parallel inputs
    before the backward GEMMs."""
    tp_comm_bulk_wgrad: bool = flag(
        True, negative="--disable-tp-comm-bulk-wgrad", role="run", in_args=False, where=("tp_comm_overlap", True)
    )
    """Reduce-scatter input gradients of column-parallel layers during the wgrad GEMM. Off: reduce-scatter
    column-parallel input gradients before the wgrad GEMM."""
    tp_comm_overlap_cfg: str | None = flag(
        None, metavar="FILE", role="run", in_args=False, where=("tp_comm_overlap", True)
    )
    """YAML file with an overlap method per GEMM (qkv_fprop, fc2_dgrad, ...): ring_exchange and pipeline for chunks,
    bulk for the whole."""
    tp_comm_overlap_methods: tuple[str, ...] = flag((), cli=False, role="run", in_args=False)
    """Contents of the file of --tp-comm-overlap-cfg, as GEMM=METHOD."""
    tp_comm_overlap_impl: str = flag(
        "auto",
        choices=("auto", "ring", "symmetric-memory", "whole"),
        role="run",
        where=("tp_comm_overlap", True),
    )
    """Transport of chunks: a ring of sends and receives, torch's symmetric memory (CUDA), or whole (none). auto:
    symmetric memory if available; on CPU whole, unless chunks are measured faster."""
    fp16: bool = flag(False, role="run", excludes=("bf16",))
    """Train in float16 with float32 main parameters and dynamic loss scaling."""
    bf16: bool = flag(False, role="run")
    """Train in bfloat16 with float32 main parameters."""
    cpu_gemm_backend: str = flag(
        "auto",
        deprecated=("--cpu-matmul",),
        choices=("auto", "onednn", "mkl", "mixed"),
        role="run",
        in_args=("cpu_matmul",),
    )
    """GEMM library of linear layers on CPU: oneDNN, mkl (torch's own, MKL in float32), or mixed: oneDNN, mkl for weight
    gradients. auto measures, and stores the choice in checkpoints."""
    params_dtype: str = flag("", cli=False, role="run", in_args=False)
    """Type of the model's parameters: float32, bfloat16, float16 or float64."""

    def __post_init__(self) -> None:
        """Set the fields that follow from others."""
        half = "float16" if self.fp16 else "bfloat16" if self.bf16 else None
        object.__setattr__(self, "params_dtype", half or self.params_dtype or "float32")

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Return the sizes of the rank grid that holds one copy of the model."""
        return ParallelSizes(
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
        )

    @property
    def cp_inner_size(self) -> int | None:
        """Return the number of ranks that share heads in a2a+p2p; None if no layer uses it."""
        if self.context_parallel_size == 1 or "a2a+p2p" not in self.cp_comm_type:
            return None
        return self.hierarchical_context_parallel_sizes[0]

    def cp_exchange(self, layer_number: int) -> str:
        """Return a layer's entry of ``cp_comm_type``: one for all layers, or one per layer."""
        return self.cp_comm_type[0 if len(self.cp_comm_type) == 1 else layer_number]


_DELAYED = ("fp8_recipe", "delayed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Config(Config, role="run", in_args=False):
    """FP8 and NVFP4 options; linear layers are quantized with ``fp8_format`` or ``fp4_format``."""

    fp4_format: str | None = flag(None, choices=("e2m1",), excludes=("fp8_format",))
    """Run linear layers in NVFP4, with --bf16 or --fp16: 4-bit E2M1 with a scale per 16 elements and per tensor."""
    fp8_format: str | None = flag(None, choices=("hybrid", "e4m3"))
    """Run linear layers in FP8, with --bf16 or --fp16: E4M3 only, or E5M2 for output gradients (hybrid)."""
    fp8_hybrid: bool = flag(False, excludes=("fp8_e4m3",), seen_as="fp8_format")
    """Same as --fp8-format hybrid."""
    fp8_e4m3: bool = flag(False, seen_as="fp8_format")
    """Same as --fp8-format e4m3."""
    fp8_recipe: str = flag(
        "delayed", choices=("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"), not_built=("custom",)
    )
    """Scope of a scale: a tensor, from the amax of earlier steps (delayed) or its own (tensorwise), a row, a block (1 x
    128, weights 128 x 128), or 32 elements of a row (mxfp8)."""
    # E4M3 spans 17 powers of two between its smallest and largest number: a larger margin would leave no range.
    fp8_margin: int = flag(0, bounds=NOT_NEGATIVE, most=17, where=_DELAYED)
    """Powers of two that delayed scaling leaves free above the expected amax, 17 at most."""
    fp8_interval: int = flag(1, bounds=POSITIVE, where=_DELAYED)
    """Iterations between updates of delayed scaling factors."""
    fp8_amax_history_len: int = flag(1, bounds=POSITIVE, most=2**20, where=_DELAYED)
    """Iterations in the amax history of delayed scaling."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"), where=_DELAYED)
    """Amax that delayed scaling expects: the most recent, or the maximum of the history."""
    fp8_wgrad: bool = flag(True, negative="--no-fp8-wgrad")
    """Compute weight gradients in FP8 or NVFP4. Off: compute weight gradients in the model's precision."""
    fp8_param_gather: bool = flag(False, needs="fp8_format")
    """All-gather weights of FP8 GEMMs in FP8 with the distributed optimizer."""
    disable_parameter_transpose_cache: bool = flag(False, needs=("fp8_format", "fp4_format"))
    """Quantize weights in every pass. Default: once per step with several micro-batches, for 2 bytes per weight (NVFP4:
    1.125)."""
    first_last_layers_bf16: bool = flag(False, needs=("fp8_format", "fp4_format"))
    """Keep the first and last layers in the model's precision."""
    num_layers_at_start_in_bf16: int = flag(1, bounds=NOT_NEGATIVE, where=("first_last_layers_bf16", True))
    """First layers that stay in the model's precision."""
    num_layers_at_end_in_bf16: int = flag(1, bounds=NOT_NEGATIVE, where=("first_last_layers_bf16", True))
    """Last layers that stay in the model's precision."""

    def __post_init__(self) -> None:
        """Set the format from the older flags."""
        if self.fp8_format is None and (self.fp8_hybrid or self.fp8_e4m3):
            object.__setattr__(self, "fp8_format", "hybrid" if self.fp8_hybrid else "e4m3")

    @property
    def is_quantized(self) -> bool:
        """Return whether matmuls run in FP8 or NVFP4."""
        return self.fp8_format is not None or self.fp4_format is not None

    def keeps_weights(self, num_microbatches: int) -> bool:
        """Return whether quantized weights and their transposes are kept for all micro-batches of a step."""
        return self.is_quantized and not self.disable_parameter_transpose_cache and num_microbatches > 1

    @property
    def saved_element_bytes(self) -> float:
        """Return the bytes per element of an input that a linear layer saves, with the scales of NVFP4's blocks."""
        return 1 if self.fp4_format is None else 0.5 + 1 / 16

    def float8_layers(self, num_layers: int) -> range:
        """Return the indices of the layers whose matmuls run in FP8 or NVFP4."""
        if not self.is_quantized:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)

    def is_in_float8(self, layer_number: int, num_layers: int) -> bool:
        """Return whether a layer's matmuls run in FP8 or NVFP4; those of MTP layers always do if one of them is on."""
        if layer_number >= num_layers:
            return self.is_quantized
        return layer_number in self.float8_layers(num_layers)


_EXPERT_LAYERS = 2


@dataclass(frozen=True)
class Fp8TensorIndex:
    """Index of a layer's FP8 matmuls: ``num_linear`` linear layers in the order of the model, then two per expert.

    With ``has_join``, the projection at the input of multi-token prediction (MTP) layers has an index between these.
    All layers have the same number of indices, whether or not they use them, so that an index means the same at any
    layout.
    """

    num_layers: int
    num_linear: int = 4
    num_experts: int = 0
    has_join: bool = False

    @property
    def join(self) -> int:
        """Return the index of the projection at the input of an MTP layer."""
        assert self.has_join
        return self.num_linear

    @property
    def num_shared(self) -> int:
        return self.num_linear + self.has_join

    @property
    def num_places(self) -> int:
        return self.num_shared + _EXPERT_LAYERS * self.num_experts

    def of_expert(self, number: int, which: int) -> int:
        """Return the index of an expert's first (0) or second (1) matmul; ``number`` is the expert's global number."""
        assert number < self.num_experts
        return self.num_shared + _EXPERT_LAYERS * number + which
