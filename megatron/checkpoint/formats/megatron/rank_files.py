"""Open the files of a Megatron-LM checkpoint, one per model-parallel rank, and map their parts of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.megatron.arguments import experts_of_file
from megatron.checkpoint.formats.megatron.parameter_keys import named_tensors
from megatron.checkpoint.formats.megatron.torch_file_reader import NAMESPACE, LazyTensor, Record, TorchFile
from megatron.core.errors import CheckpointError, DamagedCheckpointError

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class RankFile:
    """Open files of one model-parallel rank.

    ``chunks`` are the parameters of its model chunks in file order, with native names whose layer numbers count within
    the chunk. ``flat_optimizer`` is the distributed optimizer's file, if there is one. ``is_copy`` states that another
    file holds the same values except the experts.
    """

    tp_rank: int
    pp_rank: int
    file: TorchFile
    chunks: tuple[Mapping[str, LazyTensor], ...]
    flat_optimizer: TorchFile | None
    ep_rank: int = 0
    is_copy: bool = False

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Return the values of ``args``; empty if the file has none."""
        return _arguments(self.file)

    @property
    def version(self) -> float:
        """Return the ``checkpoint_version``, or 0 if the file has none."""
        return float(self.file.value.get("checkpoint_version", 0))

    def num_layers(self, chunk: int) -> int:
        numbers = {int(match.group(1)) for match in map(_LAYER_NUMBER.match, self.chunks[chunk]) if match}
        if numbers != set(range(len(numbers))):
            missing = min(set(range(max(numbers))) - numbers)
            raise CheckpointError(
                f"{self.file.path} contains layer {max(numbers)} of model chunk {chunk}, but not layer {missing}"
            )
        return len(numbers)

    def close(self) -> None:
        self.file.close()
        if self.flat_optimizer is not None:
            self.flat_optimizer.close()


def _arguments(file: TorchFile) -> Mapping[str, Any]:
    arguments = file.value.get("args") if isinstance(file.value, Mapping) else None
    if isinstance(arguments, Record) and arguments.kind == NAMESPACE:
        return arguments.attributes
    return {}


def rank_folder_name(tp_rank: int, pp_rank: int, pp: int, ep_rank: int = 0, ep: int = 1) -> str:
    """Return the name of a rank's folder, with a stage only for pp > 1 and an expert rank only for ep > 1."""
    stage, experts = f"_{pp_rank:03d}" if pp > 1 else "", f"_{ep_rank:03d}" if ep > 1 else ""
    return f"mp_rank_{tp_rank:02d}{stage}{experts}"


def expert_places(tp: int, ep: int, etp: int) -> list[tuple[int, int]]:
    """Return (TP rank, EP rank) of every file of a stage: the ranks that together hold each expert once.

    Every TP rank is included if ``etp * ep`` is at least ``tp`` and ``etp`` divides ``tp``.
    """
    return sorted({(rank % tp, rank // etp) for rank in range(etp * ep)})


def is_megatron_torch(folder: Path) -> bool:
    """Return whether a folder is one iteration's checkpoint in this format."""
    return any(_RANK_FOLDER.fullmatch(path.parent.name) for path in folder.glob(f"mp_rank_*/{MODEL_FILE}"))


def open_rank_files(folder: Path) -> dict[tuple[int, int], RankFile]:
    """Open the files by (TP rank, PP rank); of several files with different experts, only the first.

    The first file holds the optimizer state of all parameters that are not experts.

    Raises:
        CheckpointError: a file contains objects other than data, or another kind of model.
        DamagedCheckpointError: a rank's file is missing or damaged.
    """
    paths = _rank_folders(folder)
    return {(t, p): _open(path, t, p, e) for (t, p, e), path in paths.items() if e == _first(paths, t)}


def open_expert_files(folder: Path) -> list[RankFile]:
    """Open the files of all EP ranks but the first: their experts, and copies of all other parameters.

    Raises:
        CheckpointError: a file contains objects other than data, or another kind of model.
        DamagedCheckpointError: a rank's file is missing or damaged.
    """
    paths = _rank_folders(folder)
    return [_open(path, *rank, is_copy=True) for rank, path in paths.items() if rank[2] != _first(paths, rank[0])]


def _first(paths: Collection[tuple[int, int, int]], tp_rank: int) -> int:
    return min(e for t, _, e in paths if t == tp_rank)


def _rank_folders(folder: Path) -> dict[tuple[int, int, int], Path]:
    """Return every rank's folder by (TP rank, PP rank, EP rank)."""
    found = [(match, entry) for entry in sorted(folder.iterdir()) if (match := _RANK_FOLDER.fullmatch(entry.name))]
    if not found:
        raise CheckpointError(f"{folder} contains no mp_rank_XX folder")
    has_two = any(match.group(2) for match, _ in found) and not any(match.group(3) for match, _ in found)
    # A second number is the pipeline stage, or the EP rank if there is no pipeline.
    is_expert = has_two and _has_no_stages(found[0][1])
    paths: dict[tuple[int, int, int], Path] = {}
    for match, entry in found:
        tensor, *others = (int(number or 0) for number in match.groups())
        stage, experts = reversed(others) if is_expert else others
        paths[tensor, stage, experts] = entry
    tp, pp, ep = (1 + max(rank[axis] for rank in paths) for axis in (0, 1, 2))
    places = expert_places(tp, ep, tp)
    if ep > 1 and len(paths) != pp * len(places):
        places = expert_places(tp, ep, _expert_tensor_size(found[0][1], tp))
    missing = [rank_folder_name(t, p, pp, e, ep) for p in range(pp) for t, e in places if (t, p, e) not in paths]
    if missing:
        raise DamagedCheckpointError(f"{folder}: {', '.join(missing)} is missing")
    return paths


def _has_no_stages(folder: Path) -> bool:
    arguments = _arguments_in(folder)
    is_cut = isinstance(size := arguments.get("expert_model_parallel_size"), int) and size > 1
    return is_cut and arguments.get("pipeline_model_parallel_size") == 1


def _expert_tensor_size(folder: Path, tp: int) -> int:
    size = _arguments_in(folder).get("expert_tensor_parallel_size")
    return size if isinstance(size, int) and size > 0 and tp % size == 0 else tp


def _arguments_in(folder: Path) -> Mapping[str, Any]:
    if not (folder / MODEL_FILE).is_file():
        return {}
    with closing(TorchFile(folder / MODEL_FILE)) as file:
        return _arguments(file)


def _open(folder: Path, tp_rank: int, pp_rank: int, ep_rank: int, is_copy: bool = False) -> RankFile:
    file = TorchFile(folder / MODEL_FILE)
    state = file.value
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file.path} contains a {type(state).__name__}, which is not a Megatron checkpoint")
    chunk_names = (
        ["model"]
        if "model" in state
        else sorted((str(key) for key in state if re.fullmatch(r"model\d+", str(key))), key=lambda key: int(key[5:]))
    )
    if not chunk_names or not all(isinstance(state[name], Mapping) for name in chunk_names):
        raise CheckpointError(f"{file.path} contains no model; its keys are {', '.join(map(str, state))}")
    experts = experts_of_file(_arguments(file))
    chunks = tuple(named_tensors(state[name], f"{file.path} ({name})", experts) for name in chunk_names)
    flat = folder / OPTIMIZER_FILE
    return RankFile(tp_rank, pp_rank, file, chunks, TorchFile(flat) if flat.exists() else None, ep_rank, is_copy)
