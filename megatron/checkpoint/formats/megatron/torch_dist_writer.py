"""Write Megatron-LM's ``torch_dist`` format: data files, ``.metadata`` and ``common.pt``."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatron.checkpoint import BACKEND_FILE, COMMON_FILE, METADATA_FILE, CheckpointSource, is_torch_dist, new_iteration
from megatron.checkpoint.formats.megatron.arguments import TRUE_VOCAB_SIZE, plain_arguments
from megatron.checkpoint.formats.megatron.common_state import stored_schedule
from megatron.checkpoint.formats.megatron.parameter_keys import (
    CHOOSING_BIAS,
    mamba_model_key,
    rows_of_parts,
    stored_key,
    stored_parts,
)
from megatron.checkpoint.formats.megatron.rank_planner import (
    Experts,
    OptimizerTerms,
    RankPlanner,
    as_values,
    carried_from,
    distributed_optimizer_state,
    float8_entry,
    loss_scale_entry,
    param_groups,
    rank_value,
)
from megatron.checkpoint.formats.megatron.stage_parameters import OUTPUT_LAYER, WORD_EMBEDDING
from megatron.checkpoint.formats.megatron.torch_dist_metadata import read_metadata
from megatron.checkpoint.formats.megatron.torch_dist_source import read_common, read_random_states
from megatron.checkpoint.formats.megatron.torch_file_writer import (
    PlannedTensor,
    TorchFileWriter,
    given_tensor,
    namespace,
    pickle_values,
    plan_torch_file,
)
from megatron.core.dist_checkpointing import MODEL_PREFIX, dtype_name, dtype_of, sync_folder, write_text
from megatron.core.errors import CheckpointError
from megatron.core.object_store import local_copy
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.sharding import Box, split_box
from megatron.core.tokenizers import TOKENIZER_FOLDER
from megatron.core.transformer import GATED_DELTA_NET, MAMBA, MOE

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True)
class ChunkPlace:
    """Box of a stored tensor with the given key and whole shape."""

    key: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class WrittenEntry:
    """Location of a written entry; ``place`` and ``dtype`` are None for an object."""

    key: str
    file: str
    start: int
    num_bytes: int
    place: ChunkPlace | None = None
    dtype: str | None = None


class ChunkFile:
    """Append chunks and objects to a new file, which is flushed to disk when the context exits.

    Raises:
        OSError: the file cannot be written; every method may raise this.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[WrittenEntry] = []
        # Closed by __exit__.
        self._file = open(path, "wb")  # noqa: SIM115

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Flush the file to disk and close it."""
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    @property
    def num_bytes(self) -> int:
        return self._file.tell()

    def append_chunk(self, place: ChunkPlace, values: torch.Tensor) -> None:
        """Append the values of a box, reshaped to the box's shape."""
        values = values.detach().to("cpu").reshape(place.box.shape).contiguous()
        if values.untyped_storage().nbytes() != values.nbytes:
            values = values.clone()  # torch saves the whole storage of a view
        self._append(place.key, values, place, dtype_name(values.dtype))

    def append_object(self, key: str, value: Any) -> None:
        """Append an object in Megatron-LM's form, as the only item of a list."""
        self._append(key, [_with_values(value)], None, None)

    def _append(self, key: str, value: Any, place: ChunkPlace | None, dtype: str | None) -> None:
        start = self.num_bytes
        try:
            torch.save(value, self._file)
        except RuntimeError as error:
            # torch's error for a failed write hides the underlying OSError.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        self.written.append(WrittenEntry(key, self.path.name, start, self.num_bytes - start, place, dtype))


def _with_values(value: Any) -> Any:
    """Replace planned tensors with their values."""
    if isinstance(value, PlannedTensor):
        return value.values
    if isinstance(value, Mapping):
        return {key: _with_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_values(item) for item in value)
    return value


_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_shared_files(folder: Path, common: Any, written: Sequence[WrittenEntry]) -> None:
    """Complete a folder whose data files are on disk; ``.metadata`` is written last.

    Raises:
        CheckpointError: the entries do not cover all tensors completely.
        OSError: a file cannot be written.
    """
    metadata = pickle_values(build_metadata(written), _no_tensor)
    write_text(folder / BACKEND_FILE, json.dumps(_BACKENDS))
    writer = TorchFileWriter(plan_torch_file(folder / COMMON_FILE, common), create=True)
    try:
        writer.finish()
    finally:
        writer.close()
    with open(folder / METADATA_FILE, "wb") as file:
        file.write(metadata)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def build_metadata(written: Sequence[WrittenEntry]) -> Metadata:
    """Build the metadata of torch.distributed.checkpoint for all written entries.

    Raises:
        CheckpointError: chunks of a tensor are missing, or have different shapes or dtypes.
    """
    # Imported here, because it takes half a second of processor time, and most runs do not write this format.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for entry in written:
        info = _StorageInfo(entry.file, entry.start, entry.num_bytes)
        if entry.place is None or entry.dtype is None:
            described[entry.key] = BytesStorageMetadata()
            storage[MetadataIndex(entry.key)] = info
            continue
        place = entry.place
        properties = TensorProperties(dtype=dtype_of(entry.dtype))
        whole = described.setdefault(entry.key, TensorStorageMetadata(properties, torch.Size(place.shape), []))
        assert isinstance(whole, TensorStorageMetadata), entry.key
        if (whole.size, whole.properties.dtype) != (torch.Size(place.shape), properties.dtype):
            raise CheckpointError(f"{entry.key} was written with several shapes or dtypes; nothing was saved")
        offset = torch.Size(place.box.offset)
        whole.chunks.append(ChunkStorageMetadata(offset, torch.Size(place.box.shape)))
        storage[MetadataIndex(entry.key, offset)] = info
    for key, found in described.items():
        if isinstance(found, TensorStorageMetadata):
            held = sum(chunk.sizes.numel() for chunk in found.chunks)
            if held != found.size.numel():
                raise CheckpointError(
                    f"the ranks have only {held} of the {found.size.numel()} values of {key}; nothing was saved"
                )
    return Metadata(described, storage_data=storage)


def _no_tensor(tensor: PlannedTensor) -> str:
    raise AssertionError("metadata hold no tensors")


_FEED_FORWARD = ("linear_fc1", "linear_fc2")
_FULLY_RESHARDABLE = "fully_reshardable"


class TorchDistPlan:
    """Plan a checkpoint from the ``common`` section of a native index, which also gives the layout to record.

    ``carried`` are the values of ``args`` of the source checkpoint. Layers are stacked in one tensor along a new first
    axis. The distributed optimizer's state is written per parameter, in its fully reshardable form.
    """

    def __init__(self, common: Mapping[str, Any], carried: Mapping[str, Any] | None = None) -> None:
        params_dtype = dtype_from_name(common["config"]["model"]["params_dtype"])
        main_dtype = arithmetic_dtype(params_dtype)
        self.common = common
        self._planner = RankPlanner(common, lambda n: params_dtype if n.startswith(MODEL_PREFIX) else main_dtype)
        self._carried = {} if carried is None else carried
        model = self._planner.model
        self._num_layers = model.num_layers
        self._parts = model.layer_parts
        self._has_pattern = model.hybrid.hybrid_override_pattern is not None
        # Megatron-LM stacks the layers if all of them are alike.
        self._stacks = not model.hybrid.is_hybrid and (
            model.moe.num_experts is None or model.moe.moe_layer_freq.strip() == "1"
        )
        self._is_distributed = self._planner.terms is not None and bool(
            common["config"]["ddp"].get("use_distributed_optimizer")
        )
        self._is_half = self._planner.terms is not None and self._planner.terms.is_half

    def boxes_of_parts(self, name: str, shape: tuple[int, ...], box: Box) -> Iterator[Box]:
        """Yield the boxes into which a box of a native tensor is divided, because each part has a tensor of its own."""
        rows = rows_of_parts(name, self._planner.model)
        for start, count in zip(itertools.accumulate(rows, initial=0), rows):
            common = box.intersect(Box((start, *(0 for _ in shape[1:])), (count, *shape[1:])))
            if common is not None:
                yield common
        if not rows:
            yield box

    def places(self, name: str, shape: tuple[int, ...], box: Box) -> Iterator[ChunkPlace]:
        """Yield the destination chunks of a box of a native tensor, one of its `boxes_of_parts`.

        The distributed optimizer stores float32 weights a second time, as part of its own state.
        """
        yield self._place(self._stored_name(name), shape, box)
        is_trained = not name.endswith(CHOOSING_BIAS)
        if self._is_distributed and not self._is_half and name.startswith(MODEL_PREFIX) and is_trained:
            yield self._place(f"optimizer.state.param.{name.removeprefix(MODEL_PREFIX)}", shape, box)

    def padding(self, name: str, shape: tuple[int, ...], box: Box) -> Iterator[ChunkPlace]:
        """Yield the chunks of the vocabulary's padding rows; they belong to the box with the tensor's last element."""
        rows = self._planner.padded_vocab_size - shape[0] if shape else 0
        is_vocabulary = name.endswith((WORD_EMBEDDING, OUTPUT_LAYER))
        ends = tuple(start + length for start, length in zip(box.offset, box.shape, strict=True))
        if is_vocabulary and rows > 0 and ends == shape:
            yield from self.places(name, shape, Box((shape[0], *(0 for _ in shape[1:])), (rows, *shape[1:])))

    def layer_objects(self, layer: int) -> Iterator[tuple[str, None]]:
        """Yield the key and value of each extra-state object of a layer's linear modules in Megatron-LM."""
        stacked = (layer, self._num_layers) if self._stacks else None
        yield from self._extra_states("decoder.layers." if stacked else f"decoder.layers.{layer}.", layer, stacked)
        if layer == self._num_layers - 1:
            for depth in range(self._planner.model.mtp.mtp_depth):
                prefix = f"mtp.layers.{depth}."
                yield f"{prefix}eh_proj._extra_state/shard_0_1", None
                yield from self._extra_states(f"{prefix}transformer_layer.", layer, None)

    def _extra_states(self, prefix: str, layer: int, stacked: tuple[int, int] | None) -> Iterator[tuple[str, None]]:
        """Yield the extra-state objects of a layer's modules; ``stacked`` is (layer, number of layers) or None."""
        experts = self._planner.model.moe.num_experts if self._parts[layer].feed_forward == MOE else None
        place, size = stacked or (0, 1)
        for module in self._linear_modules(layer):
            yield f"{prefix}{module}._extra_state/shard_{place}_{size}", None
        for name, number in itertools.product(_FEED_FORWARD, range(experts or 0)):
            places, sizes = (f"{place}.{number}", f"{size}.{experts}") if stacked else (str(number), str(experts))
            yield f"{prefix}mlp.experts.experts.{name}._extra_state/shard_{places}_{sizes}", None

    def _linear_modules(self, layer: int) -> list[str]:
        """Return the linear modules of a layer other than its experts; -1 is the last layer."""
        model, (mixer, feed_forward) = self._planner.model, self._parts[layer]
        modules = []
        if mixer == MAMBA:
            modules = ["mixer.in_proj", "mixer.out_proj"]
        elif mixer == GATED_DELTA_NET:
            modules = ["self_attention.in_proj", "self_attention.out_proj"]
        elif mixer is not None:
            attention = ["linear_qkv"]
            if model.mla.multi_latent_attention:
                is_narrow = model.mla.q_lora_rank is not None
                of_queries = ["linear_q_down_proj", "linear_q_up_proj"] if is_narrow else ["linear_q_proj"]
                attention = [*of_queries, "linear_kv_down_proj", "linear_kv_up_proj"]
            modules = [f"self_attention.{name}" for name in ("linear_proj", *attention)]
        if feed_forward is not None and feed_forward != MOE:
            modules += [f"mlp.{name}" for name in _FEED_FORWARD]
        elif feed_forward == MOE:
            if model.moe.moe_latent_size is not None:
                modules += ["mlp.fc1_latent_proj", "mlp.fc2_latent_proj"]
            if model.moe.moe_shared_expert_intermediate_size is not None:
                modules += [f"mlp.shared_experts.{name}" for name in _FEED_FORWARD]
        return modules

    def random_state_key(self, tp_rank: int, pp_rank: int) -> str:
        """Return the key of a rank's random number streams."""
        return f"rng_state/shard_{pp_rank}.{tp_rank}_{self._planner.pp}.{self._planner.tp}"

    def random_state_objects(self, states: Mapping[tuple[int, int], Any]) -> Iterator[tuple[str, Any]]:
        """Yield the key and value of each rank's random number state; nothing if the states have another layout."""
        if states.keys() == {(tp, pp) for tp in range(self._planner.tp) for pp in range(self._planner.pp)}:
            for (tp_rank, pp_rank), value in states.items():
                yield self.random_state_key(tp_rank, pp_rank), value

    def shared_value(self, has_random_states: bool) -> dict[str, Any]:
        """Return the content of ``common.pt``."""
        progress, scheduler = self.common["progress"], self.common["scheduler"]
        arguments = self._planner.arguments(self._carried) | {
            "ckpt_format": "torch_dist",
            "use_dist_ckpt": True,
            "no_save_optim": None if self._planner.terms is not None else True,
            "no_save_rng": None if has_random_states else True,
            "iteration": progress["iteration"],
            TRUE_VOCAB_SIZE: self._planner.model.vocab_size,
        }
        value = rank_value(
            namespace(arguments),
            progress["iteration"],
            [],
            self._optimizer_value(),
            None if scheduler is None else stored_schedule(scheduler),
            None,
            float(progress["floating_point_operations_so_far"]),
        )
        sharding = {"distrib_optim_sharding_type": _FULLY_RESHARDABLE} if self._is_distributed else {}
        value |= float8_entry(self.common)
        value["content_metadata"] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, **sharding}
        return value

    def _optimizer_value(self) -> Mapping[Any, Any] | None:
        terms = self._planner.terms
        if terms is None:
            return None
        if self._planner.ep == 1:
            return self._part_value(terms, None)
        experts = Experts(self._planner.model.add_bias_linear)
        return {0: self._part_value(terms, None), 1: self._part_value(terms, experts)}

    def _part_value(self, terms: OptimizerTerms, experts: Experts | None) -> dict[str, Any]:
        if self._is_distributed:
            return {**distributed_optimizer_state(terms, experts), "param_state_sharding_type": _FULLY_RESHARDABLE}
        step = {"common_step": given_tensor(torch.tensor(float(terms.num_steps)))}
        groups = param_groups(terms, experts)
        inner = {"state": step if terms.config.optimizer == "adam" else {}, "param_groups": groups}
        return {"optimizer": inner, **loss_scale_entry(terms)} if terms.is_half else inner

    def _stored_name(self, name: str) -> str:
        """Convert a native name to this format's name."""
        if name.startswith(MODEL_PREFIX):
            return name.removeprefix(MODEL_PREFIX)
        _, kind, parameter = name.split(".", 2)
        if kind == "main_param":
            kind = "param" if self._is_distributed else "fp32_param"
        return f"optimizer.state.{kind}.{parameter}"

    def _place(self, name: str, shape: tuple[int, ...], box: Box) -> ChunkPlace:
        prefix, parameter = "", name
        if name.startswith("optimizer."):
            optimizer, state, kind, parameter = name.split(".", 3)
            prefix = f"{optimizer}.{state}.{kind}."
        if parameter in (WORD_EMBEDDING, OUTPUT_LAYER):
            shape = (self._planner.padded_vocab_size, *shape[1:])
        words = parameter.split(".")
        # An MTP layer has the same structure as the last layer.
        is_own, is_further = words[:2] == ["decoder", "layers"], words[0] == "mtp"
        number = int(words[2]) if is_own else -1
        module = ".".join(words[: 4 if is_further else 3])
        linears = {f"{module}.{linear}" for linear in self._linear_modules(number)} if is_own or is_further else ()
        branch = self._parts[number] if self._has_pattern and is_own else None
        key, layer = stored_key(parameter, linears, branch=branch, stacks=self._stacks)
        if self._has_pattern:
            key = mamba_model_key(key)
        if layer is None:
            rows, start = rows_of_parts(parameter, self._planner.model), 0
            for part, count in zip(stored_parts(parameter), rows):
                if start <= box.offset[0] < start + count:
                    box = Box((box.offset[0] - start, *box.offset[1:]), box.shape)
                    return ChunkPlace(f"{prefix}{key}.{part}", (count, *shape[1:]), box)
                start += count
            return ChunkPlace(prefix + key, shape, box)
        stacked = Box((layer, *box.offset), (1, *box.shape))
        return ChunkPlace(prefix + key, (self._num_layers, *shape), stacked)


MAX_FILE_BYTES = 4 * 1024**3
"""Size at which a new data file is started."""
_MAX_CHUNK_BYTES = 64 * 1024 * 1024


def write_torch_dist(source: CheckpointSource, directory: str | Path, iteration: int | Literal["release"]) -> Path:
    """Write the source as an iteration of ``directory`` and return the folder.

    The checkpoint loads at any layout; the source's configuration determines the layout recorded in ``args``. A source
    from Megatron-LM's files at the same layout carries over its ``args`` and random number states. The tracker file is
    written last, after everything else is on disk. The iteration's folder must not exist.

    Raises:
        CheckpointError: writing to the file system failed.
    """
    needed = sum(info.num_bytes for info in source.tensors.values())
    arguments, random_states = carried_values(source.folder)
    plan = TorchDistPlan(source.common, arguments)
    objects = list(plan.random_state_objects(random_states))
    with new_iteration(Path(directory), iteration, f"about {needed}") as folder:
        if source.common["tokenizer"] is not None:
            shutil.copytree(local_copy(source.folder / source.common["tokenizer"]), folder / TOKENIZER_FOLDER)
        written = list(_write_files(source, plan, objects, folder))
        write_shared_files(folder, plan.shared_value(has_random_states=bool(objects)), written)
    return folder


def data_file_name(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def _write_files(
    source: CheckpointSource,
    plan: TorchDistPlan,
    objects: Iterable[tuple[str, Any]],
    folder: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Iterator[WrittenEntry]:
    chunks = _chunks(source, plan)
    number, is_done = 0, False
    while not is_done:
        with ChunkFile(folder / data_file_name(0, number)) as file:
            if number == 0:
                for layer in range(int(source.common["config"]["model"]["num_layers"])):
                    for key, value in plan.layer_objects(layer):
                        file.append_object(key, value)
                for key, value in objects:
                    file.append_object(key, value)
            is_done = True
            for place, values in chunks:
                file.append_chunk(place, values)
                if file.num_bytes >= max_file_bytes:
                    is_done = False
                    break
        yield from file.written
        number += 1


def _chunks(source: CheckpointSource, plan: TorchDistPlan) -> Iterator[tuple[ChunkPlace, torch.Tensor]]:
    for name, info in source.tensors.items():
        pieces = split_box(info.whole, info.dtype.itemsize, _MAX_CHUNK_BYTES)
        for box in (part for piece in pieces for part in plan.boxes_of_parts(name, info.global_shape, piece)):
            values = source.read(name, box)
            for place in plan.places(name, info.global_shape, box):
                yield place, values
            for place in plan.padding(name, info.global_shape, box):
                yield place, torch.zeros(place.box.shape, dtype=info.dtype)


def carried_values(folder: Path) -> tuple[Mapping[str, Any], Mapping[tuple[int, int], Any]]:
    """Read the values to carry over from a folder in one of Megatron-LM's formats; empty for other formats.

    These are the values of ``args``, and the random number states by (TP rank, PP rank).
    """
    if is_torch_dist(folder):
        arguments = plain_arguments(read_common(folder)["args"].attributes)
        return arguments, read_random_states(read_metadata(folder), as_values)
    carried = carried_from(folder)
    states = {place: extras.rng_state for place, extras in carried.ranks.items() if extras.rng_state is not None}
    return carried.arguments, states
