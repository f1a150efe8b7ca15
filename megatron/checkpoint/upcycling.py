"""Upcycle a dense model: every feed-forward layer becomes experts that compute the same function (He et al. 2024).

See "Upcycling Large Language Models into Mixture of Experts", arXiv:2410.07524.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.checkpoint_source import CheckpointSource, TensorInfo
from megatron.checkpoint.conversion_request import Upcycling
from megatron.config import RunConfig
from megatron.config.checks import find_problems
from megatron.core.config_base import with_fields
from megatron.core.dist_checkpointing import MODEL_PREFIX, OPTIMIZER_PREFIX
from megatron.core.errors import ConfigurationError
from megatron.core.sharding import Box, ParamSpec, full_shards
from megatron.core.tensor_parallel import draw_box
from megatron.core.transformer import ADAPTERS

_DENSE = re.compile(r"(.+\.mlp)\.(linear_fc[12])\.(weight|bias)")


class UpcycledSource:
    """View of a dense checkpoint as a model of experts; implements `CheckpointSource`.

    The experts form groups of ``granularity``, each of which has the dense layer's channels once: expert ``e`` has
    slice ``e % granularity``. The experts of a group have the same router weights, so the top-k consists of whole
    groups, and weights that sum to 1 restore the dense output. Without experts of other sizes
    (``granularity`` 1) an expert is a copy. The second linear layer's weight is multiplied by ``granularity``, because
    each expert of a group has its share of the group's weight.

    The router has the initial values that a new run with the checkpoint's seed would draw. The optimizer state, which
    belongs to the dense weights, is left out.

    Raises:
        ConfigurationError: the model cannot be upcycled in this way.
    """

    def __init__(self, source: CheckpointSource, upcycling: Upcycling) -> None:
        self.base, self._upcycling = source, upcycling
        dense = RunConfig.from_dict(source.common["config"])
        self._refuse(source, dense)
        config = dataclasses.replace(
            dense,
            model=with_fields(
                dense.model,
                num_experts=upcycling.num_experts,
                moe_router_topk=upcycling.topk,
                moe_ffn_hidden_size=dense.model.ffn_hidden_size // upcycling.granularity,
            ),
        )
        known = find_problems(dense, needs_files=False)
        if problems := [found for found in find_problems(config, needs_files=False) if found not in known]:
            raise ConfigurationError(problems)
        self._seed, self._std = config.initialization.seed, config.model.init_method_std
        self._num_stacked = 2 if config.model.is_gated else 1
        self._width = config.model.moe.moe_ffn_hidden_size
        self.common: Mapping[str, Any] = {
            **source.common,
            "config": config.to_dict(),
            "optimizer": None,
            "scheduler": None,
        }
        self._dense: dict[str, str] = {}
        self._router: dict[str, TensorInfo] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, info in source.tensors.items():
            match = _DENSE.fullmatch(name)
            if name.startswith(OPTIMIZER_PREFIX):
                continue
            if match is None:
                tensors[name] = info
                continue
            layer, linear, kind = match.groups()
            if linear == "linear_fc1":
                shape = (upcycling.num_experts, *info.global_shape[1:])
                self._router[f"{layer}.router.{kind}"] = TensorInfo(shape, info.dtype)
            expert = f"{layer}.experts.{linear}.{kind}"
            self._dense[expert] = name
            tensors[expert] = TensorInfo((upcycling.num_experts, *self._expert_shape(name, info)), info.dtype)
        self.tensors: Mapping[str, TensorInfo] = tensors | self._router

    def _refuse(self, source: CheckpointSource, dense: RunConfig) -> None:
        model, granularity = dense.model, self._upcycling.granularity
        if model.moe.num_experts is not None:
            raise ConfigurationError(
                f"--moe-use-upcycling: {source.folder} has {model.moe.num_experts} experts already; omit it, or use a "
                "dense model"
            )
        if model.hybrid.hybrid_override_pattern is not None:
            raise ConfigurationError(
                f"--moe-use-upcycling does not support hybrid models, but {source.folder} has "
                f"--hybrid-override-pattern {model.hybrid.hybrid_override_pattern}; use a model of transformer layers"
            )
        if any(ADAPTERS in name for name in source.tensors):
            raise ConfigurationError(
                f"--moe-use-upcycling: {source.folder} contains LoRA adapters of the dense layers; add --merge-lora"
            )
        if model.ffn_hidden_size % granularity:
            raise ConfigurationError(
                f"--moe-upcycling-granularity {granularity} does not divide --ffn-hidden-size {model.ffn_hidden_size} "
                f"of {source.folder}; use a divisor of it"
            )

    @property
    def rounding(self) -> float:
        """Return how far scaled weights may be rounded, relative to a weight; 0 for a power of 2, which is exact."""
        granularity = self._upcycling.granularity
        if granularity & (granularity - 1) == 0:
            return 0.0
        return max(torch.finfo(self.tensors[name].dtype).eps for name in self._dense)

    def _expert_shape(self, name: str, info: TensorInfo) -> tuple[int, ...]:
        shape, granularity = info.global_shape, self._upcycling.granularity
        if ".linear_fc1." in name:
            return (shape[0] // granularity, *shape[1:])
        return (shape[0], *(size // granularity for size in shape[1:]))

    @property
    def folder(self) -> Path:
        return self.base.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it; experts read the boxes of their slices of the dense tensor.

        Raises:
            KeyError: there is no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """
        info = self.tensors[name]
        box = info.whole if box is None else box
        if name in self._router:
            return self._draw_router(name, box)
        if name not in self._dense:
            return self.base.read(name, box)
        (first, *offset), (count, *shape) = box.offset, box.shape
        experts = range(first, first + count)
        number = self._upcycling.granularity
        part = Box(tuple(offset), tuple(shape))
        slices = {each: self._read_slice(self._dense[name], each, part) for each in {e % number for e in experts}}
        return torch.stack([slices[expert % number] for expert in experts])

    def _read_slice(self, name: str, number: int, box: Box) -> torch.Tensor:
        """Return a box of an expert's tensor, from channels ``number * width`` on of the dense layer."""
        width, start = self._width, number * self._width
        if ".linear_fc2." in name:
            if len(box.shape) == 1:  # The weights of a token's experts sum to 1, and so do the shares of their biases.
                return self.base.read(name, box)
            moved = Box((box.offset[0], start + box.offset[1]), box.shape)
            return self.base.read(name, moved) * self._upcycling.granularity
        (row, *rest), (num_rows, *trailing) = box.offset, box.shape
        parts = []
        for stacked in range(self._num_stacked):
            low, high = max(row, stacked * width), min(row + num_rows, (stacked + 1) * width)
            if low < high:
                # Gate and up each have the channels of all slices.
                dense_row = stacked * width * self._upcycling.granularity + start + low - stacked * width
                parts.append(self.base.read(name, Box((dense_row, *rest), (high - low, *trailing))))
        return torch.cat(parts)

    def _draw_router(self, name: str, box: Box) -> torch.Tensor:
        """Return rows of a router: a row per group, repeated for each expert of the group."""
        info, number = self.tensors[name], self._upcycling.granularity
        num_experts, *trailing = info.global_shape
        shape = (num_experts // number, *trailing)
        spec = ParamSpec(name.removeprefix(MODEL_PREFIX), shape, full_shards(shape), init_std=self._std)
        (first, *offset), (count, *columns) = box.offset, box.shape
        groups = range(first // number, (first + count - 1) // number + 1)
        drawn = draw_box(spec, Box((groups.start, *offset), (len(groups), *columns)), self._seed)
        rows = drawn.repeat_interleave(number, dim=0)[first - groups.start * number :][:count]
        return rows.to(info.dtype).contiguous()

    def close(self) -> None:
        self.base.close()
