"""What Megatron keeps where in this format: keys and places of tensors, objects beside them, and shared values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.core.dist_checkpointing.state_dict import MODEL_PREFIX
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.sharding import Box
from megatron.interop.megatron_torch.common_state import stored_schedule
from megatron.interop.megatron_torch.experts.expert_keys import CHOOSING_BIAS
from megatron.interop.megatron_torch.megatron_arguments import TRUE_VOCAB_SIZE
from megatron.interop.megatron_torch.pickle_writer import given_tensor, namespace
from megatron.interop.megatron_torch.rank_planner import RankPlanner
from megatron.interop.megatron_torch.rank_tree import (
    Experts,
    OptimizerTerms,
    distributed_optimizer_state,
    float8_entry,
    loss_scale_entry,
    param_groups,
    rank_value,
)
from megatron.interop.megatron_torch.stage_parameters import OUTPUT_LAYER, WORD_EMBEDDING
from megatron.interop.torch_dist.chunk_file import ChunkPlace
from megatron.interop.torch_dist.parameter_keys import stored_key

_FEED_FORWARD = ("linear_fc1", "linear_fc2")
_FULLY_RESHARDABLE = "fully_reshardable"


class TorchDistPlan:
    """Plan a checkpoint from the ``common`` of a native index; its configuration says the layout to record.

    ``carried`` are values of ``args`` that the checkpoint came with. Layers are stacked in one tensor along a new first
    axis. The distributed optimizer's state is written in its fully reshardable form, parameter by parameter.
    """

    def __init__(self, common: Mapping[str, Any], carried: Mapping[str, Any] | None = None) -> None:
        params_dtype = dtype_from_name(common["config"]["model"]["params_dtype"])
        main_dtype = arithmetic_dtype(params_dtype)
        self.common = common
        self._planner = RankPlanner(common, lambda n: params_dtype if n.startswith(MODEL_PREFIX) else main_dtype)
        self._carried = {} if carried is None else carried
        model = self._planner.model
        self._num_layers = model.num_layers
        self._moe_layers = model.moe_layers
        # Megatron stacks the layers of a model whose layers are all alike.
        self._stacks = model.num_experts is None or model.moe_layer_freq.strip() == "1"
        self._is_distributed = self._planner.terms is not None and bool(
            common["config"]["ddp"].get("use_distributed_optimizer")
        )
        self._is_half = self._planner.terms is not None and self._planner.terms.is_half

    def places(self, name: str, shape: tuple[int, ...], box: Box) -> Iterator[ChunkPlace]:
        """Yield where the values of a box of a native tensor go.

        The distributed optimizer keeps a float32 weight a second time, as a part of its own state.
        """
        yield self._place(self._stored_name(name), shape, box)
        is_trained = not name.endswith(CHOOSING_BIAS)
        if self._is_distributed and not self._is_half and name.startswith(MODEL_PREFIX) and is_trained:
            yield self._place(f"optimizer.state.param.{name.removeprefix(MODEL_PREFIX)}", shape, box)

    def padding(self, name: str, shape: tuple[int, ...], box: Box) -> Iterator[ChunkPlace]:
        """Yield the places of the rows that pad the vocabulary; they go with the box that holds its last element."""
        rows = self._planner.padded_vocab_size - shape[0] if shape else 0
        is_vocabulary = name.endswith((WORD_EMBEDDING, OUTPUT_LAYER))
        ends = tuple(start + length for start, length in zip(box.offset, box.shape, strict=True))
        if is_vocabulary and rows > 0 and ends == shape:
            yield from self.places(name, shape, Box((shape[0], *(0 for _ in shape[1:])), (rows, *shape[1:])))

    def layer_objects(self, layer: int) -> Iterator[tuple[str, None]]:
        """Yield the key and the value of each object that Megatron's linear layers leave beside their weights."""
        stacked = (layer, self._num_layers) if self._stacks else None
        yield from self._extra_states("decoder.layers." if stacked else f"decoder.layers.{layer}.", layer, stacked)
        if layer == self._num_layers - 1:
            for depth in range(self._planner.model.num_further_tokens):
                prefix = f"mtp.layers.{depth}."
                yield f"{prefix}eh_proj._extra_state/shard_0_1", None
                yield from self._extra_states(f"{prefix}transformer_layer.", layer, None)

    def _extra_states(self, prefix: str, layer: int, stacked: tuple[int, int] | None) -> Iterator[tuple[str, None]]:
        """Yield the objects of a layer's modules; ``stacked`` are its number and that of all layers, where they are."""
        model = self._planner.model
        experts = model.num_experts if self._moe_layers[layer] else None
        attention = ["linear_qkv"]
        if model.multi_latent_attention:
            of_queries = ["linear_q_proj"] if model.q_lora_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
            attention = [*of_queries, "linear_kv_down_proj", "linear_kv_up_proj"]
        modules = [f"self_attention.{name}" for name in ("linear_proj", *attention)]
        modules += [f"mlp.{name}" for name in _FEED_FORWARD if experts is None]
        if experts is not None and model.moe_shared_expert_intermediate_size is not None:
            modules += [f"mlp.shared_experts.{name}" for name in _FEED_FORWARD]
        place, size = stacked or (0, 1)
        for module in modules:
            yield f"{prefix}{module}._extra_state/shard_{place}_{size}", None
        for name, number in itertools.product(_FEED_FORWARD, range(experts or 0)):
            places, sizes = (f"{place}.{number}", f"{size}.{experts}") if stacked else (str(number), str(experts))
            yield f"{prefix}mlp.experts.experts.{name}._extra_state/shard_{places}_{sizes}", None

    def random_state_key(self, tp_rank: int, pp_rank: int) -> str:
        """Return the key of a rank's streams of random numbers."""
        return f"rng_state/shard_{pp_rank}.{tp_rank}_{self._planner.pp}.{self._planner.tp}"

    def random_state_objects(self, states: Mapping[tuple[int, int], Any]) -> Iterator[tuple[str, Any]]:
        """Yield the key and the value of each rank's random number states; none where they are of another layout."""
        if states.keys() == {(tp, pp) for tp in range(self._planner.tp) for pp in range(self._planner.pp)}:
            for (tp_rank, pp_rank), value in states.items():
                yield self.random_state_key(tp_rank, pp_rank), value

    def shared_value(self, has_random_states: bool) -> dict[str, Any]:
        """Return what ``common.pt`` holds."""
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
        """Return a native name with the prefix that this format has for it."""
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
        # A layer of further tokens is as the last layer is.
        number = int(words[2]) if words[:2] == ["decoder", "layers"] else -1
        is_latent = self._planner.model.multi_latent_attention
        key, layer = stored_key(
            parameter, has_experts=self._moe_layers[number], is_latent=is_latent, stacks=self._stacks
        )
        if layer is None:
            return ChunkPlace(prefix + key, shape, box)
        stacked = Box((layer, *box.offset), (1, *box.shape))
        return ChunkPlace(prefix + key, (self._num_layers, *shape), stacked)
