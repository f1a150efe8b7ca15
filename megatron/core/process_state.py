"""Process-wide process groups under megatron-core's names, the only state of a process that is not passed explicitly.

`megatron.core.parallel_state` offers these functions, so that code written for megatron-core runs unchanged. The
framework's own code passes groups, and reads the process-wide ones only where a caller passes no group
(`resolve_group`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from megatron.core.device import current_device
from megatron.core.parallel_config import Grid, all_slices
from megatron.core.process_group import Group

if TYPE_CHECKING:
    AnyGroup: TypeAlias = Group | dist.ProcessGroup | None

Value = TypeVar("Value")


@dataclass
class _Communicators:
    """Communicators by their ranks, backend and timeout, kept for the next initialization in the same world."""

    world: dist.ProcessGroup | None = None
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)


@dataclass
class _ProcessState:
    """The process's groups by short name, and sizes and ranks that a caller has set.

    ``groups`` is empty before initialization. A group that does not contain this rank is absent. ``overrides`` are the
    values of the ``set_*`` functions. ``objects`` are values of other modules, such as the tracker of RNG states, which
    `destroy_model_parallel` keeps.
    """

    groups: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, int | None] = field(default_factory=dict)
    wrapped: dict[int, tuple[Any, Group]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


class GlobalMemoryBuffer:
    """Tensors by name and dtype whose memory is reused and grows to the largest request."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return uninitialized memory of a shape; its contents are lost at the next call with the same name."""
        length = math.prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < length:
            with (mem_alloc_context or contextlib.nullcontext)():
                held = torch.empty(length, dtype=dtype, device=current_device().torch_device)
            self.buffer[(name, dtype)] = held
        return held[:length].view(*tensor_shape)


_STATE = _ProcessState()
_COMMUNICATORS = _Communicators()

_DEFAULT_ORDER = "tp-cp-ep-dp-pp"

_PRIVATE_NAMES = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_GLOO": "dp_gloo",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_ag",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp_cp_gloo",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "hcp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expt_dp_gloo",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_dist_opt",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}
"""megatron-core's module variables, which tests read, and the groups that they refer to."""


def __getattr__(name: str) -> Any:
    """Return a group under megatron-core's private name, or None before initialization."""
    if name in _PRIVATE_NAMES:
        return _STATE.groups.get(_PRIVATE_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def process_object(name: str, make: Callable[[], Value]) -> Value:
    """Return the process's only object of a name, which ``make`` creates at the first call."""
    if name not in _STATE.objects:
        _STATE.objects[name] = make()
    found: Value = _STATE.objects[name]
    return found


def forget_process_object(name: str) -> None:
    """Discard the process's object of a name, if there is one."""
    _STATE.objects.pop(name, None)


class RankGenerator:
    """The groups of ranks of a grid whose axes are listed from the fastest to the slowest varying.

    ``order`` joins axis names with hyphens, such as ``tp-cp-ep-dp-pp``; an axis of size 1 may be missing.

    Raises:
        AssertionError: both ``ep`` and ``cp`` are larger than 1; experts have a grid without context parallelism.
        RuntimeError: an axis larger than 1 is missing in ``order``.
    """

    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        assert ep == 1 or cp == 1, (
            f"a grid has expert-parallel size {ep} and context-parallel size {cp}; one of them must be 1, because "
            "experts have a separate grid"
        )
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.world_size = tp * dp * pp * cp * ep
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        axes = order.lower().split("-")
        if unknown := [axis for axis in axes if axis not in self.name_to_size]:
            raise RuntimeError(f"order {order!r} has unknown axes {unknown}; axes are tp, cp, ep, dp and pp")
        for axis, size in self.name_to_size.items():
            if axis not in axes and size != 1:
                raise RuntimeError(f"order {order!r} does not contain {axis}, whose size is {size}; add {axis} to it")
        axes += [axis for axis in self.name_to_size if axis not in axes]
        self.order = "-".join(axes)
        self.ordered_size = [self.name_to_size[axis] for axis in axes]

    @property
    def grid(self) -> Grid:
        """Return the sizes by axis, from the slowest to the fastest varying."""
        return {axis: self.name_to_size[axis] for axis in reversed(self.order.split("-"))}

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return for each axis of ``order`` whether ``token`` contains it."""
        return [axis in token.split("-") for axis in order.split("-")]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return all groups that span the axes of ``token``, such as ``tp-dp``."""
        slices = all_slices(self.grid, tuple(token.split("-")))
        return [[self.rank_offset + rank for rank in ranks] for ranks in slices]


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the groups of ranks that span the axes whose ``mask`` is true.

    ``parallel_size`` has the sizes of the axes from the fastest to the slowest varying.

    Raises:
        AssertionError: the product of the sizes is not ``world_size``.
    """
    assert math.prod(parallel_size) == world_size, (
        f"the product of the sizes {list(parallel_size)} is not the world size {world_size}"
    )
    grid = {str(axis): parallel_size[axis] for axis in reversed(range(len(parallel_size)))}
    return [list(ranks) for ranks in all_slices(grid, tuple(str(axis) for axis, each in enumerate(mask) if each))]


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the first and the last stage of a pipeline, which hold the word embedding."""
    return list(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the first stage of a pipeline, which holds the position embedding."""
    return [pp_ranks[0]]


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> dist.ProcessGroup:
    """Create a process group; collective over all ranks of the world."""
    made: dist.ProcessGroup = dist.new_group(
        ranks=None if ranks is None else list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    return made


@dataclass(frozen=True)
class _Maker:
    """Makes this rank's groups; every rank of the world calls it for the same sets of ranks in the same order."""

    rank: int
    timeout: timedelta

    def communicator(self, ranks: Sequence[int], backend: str | None = None, purpose: str = "") -> Any:
        """Return the communicator of a set of ranks, a separate one for each ``purpose``."""
        if backend == dist.get_backend():
            backend = None
        key = (tuple(sorted(ranks)), self.timeout, backend, purpose)
        made = _COMMUNICATORS.made
        if key not in made:
            made[key] = create_group(ranks, self.timeout, backend)
        return made[key]

    def group_of(self, groups: Sequence[Sequence[int]], backend: str | None = None, purpose: str = "") -> Any:
        """Return the group among ``groups`` that contains this rank; None if none does."""
        own = None
        for ranks in groups:
            made = self.communicator(ranks, backend, purpose)
            if self.rank in ranks:
                own = made
        return own

    def levels_of(self, groups: Sequence[Sequence[int]], sizes: Sequence[int], backend: str | None = None) -> list[Any]:
        """Return this rank's group on each level of nested groups; ``sizes`` are from the innermost level on."""
        found = []
        for level, size in enumerate(sizes):
            inner = math.prod(sizes[:level])
            starts = [first + i for first in range(0, math.prod(sizes), inner * size) for i in range(inner)]
            sets = [[ranks[start + inner * j] for j in range(size)] for ranks in groups for start in starts]
            found.append(self.group_of(sets, backend))
        return found


def _check_unsupported(**options: Any) -> None:
    """Raise for options that the process groups cannot express."""
    if given := [f"{name}={value!r}" for name, value in options.items() if value]:
        raise RuntimeError(f"initialize_model_parallel does not support {', '.join(given)}; leave it at its default")


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = _DEFAULT_ORDER,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
) -> None:
    """Create this process's groups; collective over all ranks of an initialized ``torch.distributed``.

    A set of ranks has one communicator, except that all-gathers have their own with ``create_all_gather_group``.

    Raises:
        AssertionError: ``torch.distributed`` is not initialized, or the groups already are.
        RuntimeError: the world size is not divisible by the sizes, or an option is unsupported (SHARP, files of NCCL
            options, high-priority streams, a communication backend for the pipeline).
    """
    assert dist.is_initialized(), (
        "torch.distributed is not initialized; call torch.distributed.init_process_group first"
    )
    assert not is_initialized(), "process groups are already initialized; call destroy_model_parallel first"
    _check_unsupported(
        pipeline_model_parallel_comm_backend=(
            None if pipeline_model_parallel_comm_backend == dist.get_backend() else pipeline_model_parallel_comm_backend
        ),
        use_sharp=use_sharp,
        sharp_enabled_group=sharp_enabled_group,
        nccl_communicator_config_path=nccl_communicator_config_path,
        high_priority_stream_groups=high_priority_stream_groups,
    )
    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    ep = expert_model_parallel_size
    etp = tp if expert_tensor_parallel_size is None else expert_tensor_parallel_size
    world_size = dist.get_world_size()
    if world_size % (tp * pp * cp):
        raise RuntimeError(
            f"world_size ({world_size}) is not divisible by tensor({tp}) x pipeline({pp}) x context({cp}) = "
            f"{tp * pp * cp}"
        )
    if world_size % (etp * ep * pp):
        raise RuntimeError(
            f"world_size ({world_size}) is not divisible by expert-tensor({etp}) x expert({ep}) x pipeline({pp}) = "
            f"{etp * ep * pp}"
        )
    if virtual_pipeline_model_parallel_size is not None and pp == 1:
        raise RuntimeError("pipeline-model-parallel size should be greater than 1 with interleaved schedule")
    dense = RankGenerator(tp=tp, ep=1, dp=world_size // (tp * pp * cp), pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=etp, ep=ep, dp=world_size // (etp * ep * pp), pp=pp, cp=1, order=order)
    assert dense.get_ranks("pp") == experts.get_ranks("pp"), (
        f"order {order!r} gives experts other pipelines than the rest of the model: {experts.get_ranks('pp')} and "
        f"{dense.get_ranks('pp')}; end it with pp"
    )
    instances = num_distributed_optimizer_instances
    for size, kind in ((dense.dp * cp, "data x context"), (experts.dp, "expert-data")):
        assert size % instances == 0, (
            f"{kind}-parallel size {size} is not divisible by num_distributed_optimizer_instances {instances}"
        )
    if hierarchical_context_parallel_sizes:
        assert math.prod(hierarchical_context_parallel_sizes) == cp, (
            f"the product of hierarchical_context_parallel_sizes {hierarchical_context_parallel_sizes} is not "
            f"context_parallel_size {cp}"
        )

    if _COMMUNICATORS.world is not dist.group.WORLD:
        _COMMUNICATORS.made.clear()
        _COMMUNICATORS.world = dist.group.WORLD
    timeout = timedelta(minutes=distributed_timeout_minutes)
    _COMMUNICATORS.made[(tuple(range(world_size)), timeout, None, "")] = dist.group.WORLD
    maker = _Maker(dist.get_rank(), timeout)
    groups: dict[str, Any] = {
        name: maker.group_of(generator.get_ranks(token))
        for name, generator, token in (
            ("dp_cp", dense, "dp-cp"),
            ("dp", dense, "dp"),
            ("cp", dense, "cp"),
            ("mp", dense, "tp-pp"),
            ("tp", dense, "tp"),
            ("pp", dense, "pp"),
            ("tp_dp_cp", dense, "tp-dp-cp"),
            ("tp_dp", dense, "tp-dp"),
            ("tp_cp", dense, "tp-cp"),
            ("ep", experts, "ep"),
            ("expt_tp", experts, "tp"),
            ("tp_ep", experts, "tp-ep"),
            ("tp_ep_pp", experts, "tp-ep-pp"),
            ("expt_dp", experts, "dp"),
        )
    }
    pipelines = dense.get_ranks("pp")
    groups["embd"] = maker.group_of([(get_embedding_ranks or default_embedding_ranks)(ranks) for ranks in pipelines])
    groups["pos_embd"] = maker.group_of(
        [(get_position_embedding_ranks or default_position_embedding_ranks)(ranks) for ranks in pipelines]
    )
    if create_all_gather_group:
        groups["dp_cp_ag"] = maker.group_of(dense.get_ranks("dp-cp"), purpose="all-gather")
    if hierarchical_context_parallel_sizes:
        groups["hcp"] = maker.levels_of(dense.get_ranks("cp"), hierarchical_context_parallel_sizes)
    if hybrid_context_parallel:
        groups["hybrid"] = _hybrid_groups(maker, dense.get_ranks("dp-cp"))
    size = experts.dp // instances
    models = experts.get_ranks("tp-ep-pp")
    groups["intra_dist_opt"] = maker.group_of(
        [[rank for ranks in models[first : first + size] for rank in ranks] for first in range(0, len(models), size)]
    )
    for suffix, backend in (("", None), ("_gloo", "gloo"))[: 2 if create_gloo_process_groups else 1]:
        if backend is not None:
            for name, generator, token in (("dp", dense, "dp"), ("dp_cp", dense, "dp-cp"), ("expt_dp", experts, "dp")):
                groups[f"{name}{suffix}"] = maker.group_of(generator.get_ranks(token), backend)
        groups |= {
            f"{name}{suffix}": group
            for name, group in _optimizer_instances(maker, dense, experts, instances, backend).items()
        }
    _STATE.groups = {name: group for name, group in groups.items() if group is not None}
    if virtual_pipeline_model_parallel_size is not None:
        _STATE.overrides["virtual_rank"] = 0
        _STATE.overrides["virtual_size"] = virtual_pipeline_model_parallel_size


def _hybrid_groups(maker: _Maker, groups: Sequence[Sequence[int]]) -> dict[int, Any]:
    """Return this rank's groups of neighbors, for each power of two below the size of its data x context group."""
    size = len(groups[0])
    assert size % 2 == 0, f"hybrid_context_parallel needs an even number of data x context ranks; there are {size}"
    sizes = [2**power for power in range(1, int(math.log2(size)))]
    return {
        each: maker.group_of([ranks[i : i + each] for ranks in groups for i in range(0, size, each)]) for each in sizes
    }


def _optimizer_instances(
    maker: _Maker, dense: RankGenerator, experts: RankGenerator, instances: int, backend: str | None
) -> dict[str, Any]:
    """Return this rank's groups within and between instances of the distributed optimizer."""
    inner = dense.dp * dense.cp // instances
    dense_groups = [ranks[i : i + inner] for ranks in dense.get_ranks("dp-cp") for i in range(0, len(ranks), inner)]
    levels = maker.levels_of(experts.get_ranks("dp"), (experts.dp // instances, instances), backend)
    groups = {"intra_dp_cp": maker.group_of(dense_groups, backend), "intra_expt_dp": levels[0]}
    return groups if instances == 1 else groups | {"inter_dist_opt": levels[1]}


def destroy_model_parallel() -> None:
    """Forget the groups; their communicators stay for the next initialization in the same world."""
    _STATE.groups = {}
    _STATE.overrides = {}
    _STATE.wrapped = {}
    destroy_global_memory_buffer()


def is_initialized() -> bool:
    """Return whether the process-wide groups exist."""
    return bool(_STATE.groups)


def is_unitialized() -> bool:
    """Return whether the process-wide groups do not exist (deprecated; use `is_initialized`)."""
    warnings.warn("is_unitialized is deprecated; use is_initialized", DeprecationWarning, 2)
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Return whether the process-wide groups exist."""
    return is_initialized()


_MEANINGS = {
    "tp": "tensor model parallel",
    "pp": "pipeline_model parallel",
    "mp": "model parallel",
    "dp": "data parallel",
    "dp_cp": "data parallel group with context parallel combined",
    "cp": "context parallel",
    "ep": "expert model parallel",
}


def _group(name: str, check_initialized: bool = True) -> dist.ProcessGroup:
    """Return this rank's group of a name; unchecked, None before initialization, as in megatron-core."""
    group: Any = _STATE.groups.get(name)
    if check_initialized:
        assert group is not None, (
            f"{_MEANINGS.get(name, name)} group is not initialized on this rank; call initialize_model_parallel first"
        )
    found: dist.ProcessGroup = group
    return found


def resolve_group(group: AnyGroup, default: str = "tp") -> Group:
    """Return the ranks and communicator that a caller passed as ours or torch's, or the process-wide group.

    ``default`` is the short name of the process-wide group, such as ``tp``. Before initialization it is a group of one
    rank if ``torch.distributed`` is not initialized either.

    Raises:
        AssertionError: no group was passed, and there are several processes but no process-wide groups.
    """
    if isinstance(group, Group):
        return group
    if group is None and not _STATE.groups and not _has_distributed():
        return Group((default,), (0,), 0)
    handle: dist.ProcessGroup = _group(default) if group is None else group
    known = _STATE.wrapped.get(id(handle))
    if known is None or known[0] is not handle:
        ranks = tuple(dist.get_process_group_ranks(handle))
        known = (handle, Group((default,), ranks, dist.get_rank(handle), handle))
        _STATE.wrapped[id(handle)] = known
    return known[1]


def _ranks(name: str) -> list[int]:
    ranks: list[int] = dist.get_process_group_ranks(_group(name))
    return ranks


def _size(name: str, is_required: bool = False) -> int:
    """Return the size of a group, or what a caller has set; 0 without ``torch.distributed`` unless it is required."""
    override = _STATE.overrides.get(f"{name}_size")
    if override is not None:
        return override
    return int(_group(name).size()) if is_required or _has_distributed() else 0


def _rank(name: str, is_required: bool = False) -> int:
    """Return this rank's index in a group, or what a caller has set; 0 as in `_size`."""
    override = _STATE.overrides.get(f"{name}_rank")
    if override is not None:
        return override
    return int(_group(name).rank()) if is_required or _has_distributed() else 0


def _has_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the ranks that hold one copy of the model (tensor x pipeline)."""
    return _group("mp", check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the tensor-parallel group."""
    return _group("tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the pipeline-parallel group."""
    return _group("pp", check_initialized)


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, independent_all_gather: bool = False
) -> dist.ProcessGroup:
    """Return the data-parallel group; with context parallelism, the ranks that reduce gradients.

    ``partial_data_parallel`` selects the ranks of one instance of the distributed optimizer, and
    ``independent_all_gather`` the communicator for all-gathers.
    """
    if not with_context_parallel:
        assert not partial_data_parallel, "partial_data_parallel needs with_context_parallel=True"
        return _group("dp")
    return _group("intra_dp_cp" if partial_data_parallel else "dp_cp_ag" if independent_all_gather else "dp_cp")


def has_separate_all_gather_group() -> bool:
    """Return whether all-gathers over data x context ranks have their own communicator."""
    return "dp_cp_ag" in _STATE.groups


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> dist.ProcessGroup:
    """Return the data-parallel group with the gloo backend."""
    if not with_context_parallel:
        assert not partial_data_parallel, "partial_data_parallel needs with_context_parallel=True"
        return _group("dp_gloo")
    return _group("intra_dp_cp_gloo" if partial_data_parallel else "dp_cp_gloo")


def get_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the context-parallel group."""
    return _group("cp", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of the context-parallel group."""
    return _ranks("cp") if check_initialized or is_initialized() else None


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[dist.ProcessGroup] | None:
    """Return the context-parallel groups from the innermost level on."""
    groups = _STATE.groups.get("hcp")
    assert groups is not None or not check_initialized, "hierarchical context parallel groups are not initialized"
    return groups


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> dist.ProcessGroup:
    """Return the group of ``group_size`` neighboring data x context ranks."""
    if group_size == get_data_parallel_world_size(with_context_parallel=True):
        return _group("dp_cp", check_initialized)
    groups: dict[int | None, dist.ProcessGroup] = _STATE.groups.get("hybrid", {})
    if group_size not in groups:
        raise KeyError(f"there is no hybrid group of {group_size} ranks; there are groups of {list(groups)}")
    return groups[group_size]


def get_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the pipeline stages that hold the word embedding."""
    return _group("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the pipeline stages that hold the position embedding."""
    return _group("pos_embd", check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> dist.ProcessGroup:
    """Return the ranks that reduce FP8 amax values."""
    if tp_only_amax_red:
        return _group("tp_cp" if with_context_parallel else "tp")
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp")


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> dist.ProcessGroup:
    """Return the tensor x data (x context) parallel group."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the tensor x context parallel group."""
    return _group("tp_cp", check_initialized)


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Override the tensor-parallel size."""
    _STATE.overrides["tp_size"] = world_size


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Override the pipeline-parallel size."""
    _STATE.overrides["pp_size"] = world_size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages per pipeline rank."""
    _STATE.overrides["virtual_size"] = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Override the tensor-parallel rank."""
    _STATE.overrides["tp_rank"] = rank


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Override the pipeline-parallel rank."""
    _STATE.overrides["pp_rank"] = rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage (deprecated; pass ``vp_stage``)."""
    warnings.warn("set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage", DeprecationWarning, 2)
    _STATE.overrides["virtual_rank"] = rank


def set_data_parallel_rank(rank: int | None) -> None:
    """Override the data-parallel rank."""
    _STATE.overrides["dp_rank"] = rank


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Override the expert-parallel size."""
    _STATE.overrides["ep_size"] = world_size


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Override the expert-parallel rank."""
    _STATE.overrides["ep_rank"] = rank


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Override the expert-tensor-parallel size."""
    _STATE.overrides["expt_tp_size"] = world_size


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Override the expert-tensor-parallel rank."""
    _STATE.overrides["expt_tp_rank"] = rank


def get_tensor_model_parallel_world_size() -> int:
    """Return the tensor-parallel size."""
    return _size("tp", is_required=True)


def get_pipeline_model_parallel_world_size() -> int:
    """Return the pipeline-parallel size."""
    return _size("pp", is_required=True)


def get_tensor_model_parallel_rank() -> int:
    """Return the tensor-parallel rank."""
    return _rank("tp", is_required=True)


def get_pipeline_model_parallel_rank() -> int:
    """Return the pipeline stage of this rank."""
    return _rank("pp", is_required=True)


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the virtual stage; None without virtual stages."""
    return _STATE.overrides.get("virtual_rank")


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages per pipeline rank; None without virtual stages."""
    return _STATE.overrides.get("virtual_size")


def _is_virtual_stage(stage: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Return whether ``vp_stage`` is the virtual stage with this index, counted from the end if it is negative."""
    number = get_virtual_pipeline_model_parallel_world_size()
    if ignore_virtual or number is None:
        return True
    assert vp_stage is not None, f"pass vp_stage, because there are {number} virtual stages per rank"
    return vp_stage == stage % number


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the first stage; without ``ignore_virtual`` also the first virtual stage."""
    return _is_virtual_stage(0, ignore_virtual, vp_stage) and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the last stage; without ``ignore_virtual`` also the last virtual stage."""
    last = get_pipeline_model_parallel_world_size() - 1
    return _is_virtual_stage(-1, ignore_virtual, vp_stage) and get_pipeline_model_parallel_rank() == last


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank, or without ``ignore_virtual`` this virtual stage, holds the word embedding."""
    if "embd" not in _STATE.groups:
        return False
    ranks, rank = _ranks("embd"), dist.get_rank()
    if ignore_virtual:
        return rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if rank == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return rank in ranks


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds the position embedding."""
    return "pos_embd" in _STATE.groups


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank in the tensor-parallel group."""
    return _ranks("tp")[0]


def get_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank that holds this copy of the model."""
    return _ranks("mp")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the global rank of the first rank in the data-parallel group."""
    return _ranks("dp_cp" if with_context_parallel else "dp")[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of the first stage of this rank's pipeline."""
    return _ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this rank's pipeline."""
    return _ranks("pp")[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; the first stage follows the last."""
    return _ranks("pp")[(get_pipeline_model_parallel_rank() + 1) % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; the last stage precedes the first."""
    return _ranks("pp")[(get_pipeline_model_parallel_rank() - 1) % get_pipeline_model_parallel_world_size()]


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Return the data-parallel size."""
    if not _has_distributed():
        return 0
    return int(get_data_parallel_group(with_context_parallel, partial_data_parallel).size())


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Return the data-parallel rank."""
    override = _STATE.overrides.get("dp_rank")
    if override is not None:
        return override
    if not _has_distributed():
        return 0
    return int(get_data_parallel_group(with_context_parallel, partial_data_parallel).rank())


def get_context_parallel_world_size() -> int:
    """Return the context-parallel size."""
    return _size("cp")


def get_context_parallel_rank() -> int:
    """Return the context-parallel rank."""
    return _rank("cp")


def get_tensor_and_context_parallel_world_size() -> int:
    """Return the size of the tensor x context parallel group."""
    return _size("tp_cp")


def get_tensor_and_context_parallel_rank() -> int:
    """Return the rank in the tensor x context parallel group."""
    return _rank("tp_cp")


def get_expert_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the expert-parallel group, whose ranks hold different experts."""
    return _group("ep", check_initialized)


def get_expert_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank in the expert-parallel group."""
    return _ranks("ep")[0]


def get_expert_model_parallel_world_size() -> int:
    """Return the expert-parallel size."""
    return _size("ep")


def get_expert_model_parallel_rank() -> int:
    """Return the expert-parallel rank."""
    return _rank("ep")


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the ranks that shard the same experts."""
    return _group("expt_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int | None:
    """Return the expert-tensor-parallel size; before initialization the tensor-parallel size that was set."""
    override = _STATE.overrides.get("expt_tp_size")
    if override is not None:
        return override
    return _size("expt_tp") if is_initialized() else _STATE.overrides.get("tp_size")


def get_expert_tensor_parallel_rank() -> int | None:
    """Return the expert-tensor-parallel rank; before initialization the tensor-parallel rank that was set."""
    override = _STATE.overrides.get("expt_tp_rank")
    if override is not None:
        return override
    return _rank("expt_tp") if is_initialized() else _STATE.overrides.get("tp_rank")


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the ranks that hold one copy of a stage's experts (expert-tensor x expert)."""
    return _group("tp_ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Return the number of ranks that hold one copy of a stage's experts."""
    return _size("tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Return the rank among those that hold one copy of a stage's experts."""
    return _rank("tp_ep")


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the ranks that hold one copy of all experts (expert-tensor x expert x pipeline)."""
    return _group("tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> dist.ProcessGroup:
    """Return the ranks that hold the same experts, or those of one instance of the distributed optimizer."""
    return _group("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> dist.ProcessGroup:
    """Return the ranks that hold the same experts (deprecated; use `get_expert_data_parallel_group`)."""
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated; use get_expert_data_parallel_group", DeprecationWarning, 2
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> dist.ProcessGroup:
    """Return the ranks that hold the same experts, with the gloo backend."""
    return _group("intra_expt_dp_gloo" if partial_expert_data_parallel else "expt_dp_gloo")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Return the rank among those that hold the same experts."""
    return _rank("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Return the number of ranks that hold the same experts."""
    return _size("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return all ranks of one instance of the distributed optimizer."""
    return _group("intra_dist_opt", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Return the ranks with the same shard in the instances of the distributed optimizer."""
    return _group("inter_dist_opt", check_initialized)


def get_all_ranks() -> str:
    """Return the tensor, data, context, pipeline and expert ranks, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(map(str, ranks))


_MEMORY_BUFFER = "global_memory_buffer"


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the process's memory that layers reuse."""
    return process_object(_MEMORY_BUFFER, GlobalMemoryBuffer)


def destroy_global_memory_buffer() -> None:
    """Free the process's memory that layers reuse."""
    forget_process_object(_MEMORY_BUFFER)
