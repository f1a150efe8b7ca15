"""Parameters of one model-parallel rank in Megatron-LM's order, and their shards of the global tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.checkpoint.formats.megatron.parameter_keys import (
    CHOOSING_BIAS,
    branch_key,
    expert_number,
    expert_shards,
    fused_key,
    is_expert_key,
    module_of,
)
from megatron.core.device import Device
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.optimizer import is_decayed
from megatron.core.parallel_config import ONE_RANK
from megatron.core.parallel_state import ExpertGroups
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, Shard, even_shards, spec_of
from megatron.core.tensor_parallel import RngStreams

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of a rank's model chunk.

    ``key`` is its name in the chunk, whose layers are numbered from 0, and ``name`` its name in the whole model.
    ``shards`` map boxes of the global tensor to the local tensor. Elements outside all shards are padding.
    ``is_replica`` marks every copy but the first. ``is_tied`` marks a word embedding that the first and the last stage
    share: the last stage's copy has the key of an output layer.
    """

    key: str
    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    is_replica: bool
    is_tied: bool

    @property
    def is_decayed(self) -> bool:
        """Return whether weight decay applies to the parameter."""
        return len(self.local_shape) > 1 and not self.key.endswith("bias")

    @property
    def is_trained(self) -> bool:
        """Return whether the optimizer updates the parameter; it does not update the router's expert bias."""
        return not self.key.endswith(CHOOSING_BIAS)

    @property
    def is_expert(self) -> bool:
        return is_expert_key(self.key)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape in the file, where a single expert's tensor has no expert dimension."""
        return self.local_shape[1:] if self.is_expert else self.local_shape

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the local tensor, including padding."""
        return math.prod(self.local_shape)


class StageDescriber:
    """Describe the parameters of any rank of a model-parallel layout; the model is built on the meta device.

    ``padded_vocab_size`` is the number of embedding rows over all tensor-parallel ranks, if the files differ from the
    configuration. ``cuts_narrow`` states that MLA's down projections are sharded over the tensor-parallel ranks, as in
    Megatron Core's own layers. In Transformer Engine's layers they are replicated.
    """

    def __init__(self, config: GPTConfig, padded_vocab_size: int | None = None, *, cuts_narrow: bool = False) -> None:
        self._cuts_narrow = cuts_narrow
        tp = config.tensor_model_parallel_size
        if padded_vocab_size is not None:
            config = dataclasses.replace(config, make_vocab_size_divisible_by=padded_vocab_size // tp)
        self.config = dataclasses.replace(config, sequence_parallel=False)
        self._rng = RngStreams(Device("cpu"), None, ONE_RANK.place())

    def parameters(
        self, tp_rank: int, layer_numbers: Sequence[int], *, has_embedding: bool, has_loss: bool, ep_rank: int = 0
    ) -> tuple[LocalParameter, ...]:
        """Return the parameters of one model chunk in the order of Megatron-LM's optimizer."""
        tp, ep = self.config.tensor_model_parallel_size, self.config.expert_model_parallel_size
        etp = self.config.parallel_sizes.expert_tp
        group = Group(("tp",), tuple(range(tp)), tp_rank)
        of_experts = dataclasses.replace(
            ExpertGroups.like_dense(group, None),
            model=Group(("ep", "tp"), tuple(range(etp * ep)), ep_rank * etp + tp_rank % etp),
            tensor_size=etp,
        )
        model = GPTModel(
            self.config,
            group,
            self._rng,
            seed=0,
            device="meta",
            layer_numbers=layer_numbers,
            pre_process=has_embedding,
            post_process=has_loss,
            experts=of_experts,
        )
        local_numbers = {number: local for local, number in enumerate(layer_numbers)}
        found: dict[str, LocalParameter] = {}
        for parameter_name, parameter in model.named_parameters():
            spec = spec_of(parameter)
            is_copy = spec.is_tied_over_pipeline and parameter_name == OUTPUT_LAYER
            local_shape, shards, is_replica = tuple(parameter.shape), spec.shards, not spec.is_owner
            if spec.is_expert:
                for local in _of_single_experts(spec, local_shape, local_numbers):
                    found[local.key] = local
                continue
            is_cut = self._cuts_narrow and is_narrow_map(spec.name)
            if is_cut or parameter_name.rsplit(".", 1)[-1] != spec.name.rsplit(".", 1)[-1]:
                # Ranks that share a key-value group keep it as a separate tensor here; Megatron-LM shards all rows
                # evenly.
                rows = spec.global_shape[0] // tp
                local_shape, is_replica = (rows, *spec.global_shape[1:]), False
                shards = even_shards(spec.global_shape, 0, tp_rank, tp)
            key = OUTPUT_LAYER if is_copy else self._key(spec.name, local_numbers)
            is_tied = spec.is_tied_over_pipeline
            found.setdefault(
                key, LocalParameter(key, spec.name, spec.global_shape, local_shape, shards, is_replica, is_tied)
            )
            assert found[key].is_decayed == is_decayed(spec.name, parameter), key
        return tuple(_in_order_of_mixers(_one_expert_after_the_other(found.values())))

    def _key(self, name: str, local_numbers: dict[int, int]) -> str:
        key, words = _with_layer(name, local_numbers), name.split(".")
        if self.config.hybrid.hybrid_override_pattern is None or words[:2] != ["decoder", "layers"]:
            return key
        return branch_key(key, self.config.layer_parts[int(words[2])])


def is_narrow_map(key: str) -> bool:
    return key.endswith((".linear_q_down_proj.weight", ".linear_kv_down_proj.weight"))


def _of_single_experts(
    spec: ParamSpec, local_shape: tuple[int, ...], local_numbers: dict[int, int]
) -> Iterator[LocalParameter]:
    """Yield the parameters of each local expert, which are separate tensors in Megatron-LM's files."""
    key = _with_layer(spec.name, local_numbers)
    for number, shards in expert_shards(spec):
        own_key = key.replace(".mlp.experts.", f".mlp.experts.local_experts.{number}.")
        shape = (1, *local_shape[1:])
        yield LocalParameter(own_key, spec.name, spec.global_shape, shape, shards, not spec.is_owner, is_tied=False)


def _one_expert_after_the_other(parameters: Iterable[LocalParameter]) -> Iterator[LocalParameter]:
    """Yield the parameters with those of a layer's experts grouped by expert, as in a list of modules."""
    for is_expert, neighbors in itertools.groupby(parameters, lambda parameter: parameter.is_expert):
        own = list(neighbors)
        yield from sorted(own, key=lambda p: expert_number(p.key) or 0) if is_expert else own


_IN_MIXER = re.compile(r"(.+\.(?:mixer|self_attention))\.([A-Za-z0-9_]+)(?:\.(?:weight|bias))?")
_ORDER_IN_MIXER = ("dt_bias", "A_log", "D", "in_proj", "conv1d", "norm", "out_norm", "out_proj")


def _in_order_of_mixers(parameters: Iterable[LocalParameter]) -> Iterator[LocalParameter]:
    """Yield the parameters with those of each Mamba-2 or gated delta-net in Megatron-LM's order."""

    def place(parameter: LocalParameter) -> tuple[str, int]:
        found = _IN_MIXER.fullmatch(parameter.key)
        return (found[1], _ORDER_IN_MIXER.index(found[2])) if found and found[2] in _ORDER_IN_MIXER else ("", 0)

    for _, neighbors in itertools.groupby(parameters, lambda parameter: place(parameter)[0]):
        yield from sorted(neighbors, key=lambda parameter: place(parameter)[1])


def _with_layer(name: str, numbers: dict[int, int]) -> str:
    """Replace the layer number in the whole model with the layer number in the chunk."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(numbers[int(words[2])])
    return ".".join(words)


def in_grouped_order(parameters: Iterable[LocalParameter]) -> tuple[LocalParameter, ...]:
    """Return a chunk's parameters in the order of grouped experts: each linear layer of all experts in turn."""
    ordered: list[LocalParameter] = []
    for is_expert, neighbors in itertools.groupby(parameters, lambda parameter: parameter.is_expert):
        own = list(neighbors)
        ordered += sorted(own, key=lambda p: p.name) if is_expert else own
    return tuple(ordered)


def in_fused_order(parameters: Sequence[LocalParameter]) -> tuple[LocalParameter, ...]:
    """Return a chunk's parameters in the order of Transformer Engine's layers.

    There a norm belongs to the linear layer that it precedes. The QKV layer follows the output projection.
    """
    modules = {module_of(parameter.key) for parameter in parameters}
    norms: dict[str, list[LocalParameter]] = {}
    others: list[LocalParameter] = []
    for parameter in parameters:
        key = fused_key(parameter.key, modules)
        (others if key == parameter.key else norms.setdefault(module_of(key), [])).append(parameter)
    ordered: list[LocalParameter] = []
    for parameter in others:
        ordered += [*norms.pop(module_of(parameter.key), []), parameter]
    return tuple(ordered)
