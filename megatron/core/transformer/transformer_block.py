"""The transformer layers of one pipeline stage with the final norm; recomputation and offloading of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import nn

from megatron.core.errors import ConfigurationError
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys, SelectedKeys
from megatron.core.parallel_state import ExpertGroups
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import ActivationOffload, saved_in_parts
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.cuda_graphs import GraphedLayers, GraphUnit
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.norm import NormAhead, make_norm
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.shared_tensors import SharedTensors
from megatron.core.transformer.single_branch_layer import make_layer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.weight_prefetch import WeightPrefetch


class TransformerBlock(nn.Module):
    """The layers numbered ``layer_numbers`` (global, from 0), and on the last stage the final norm.

    Layers are keyed by their global numbers, so that parameter names are the same in any pipeline layout. In training
    the layers run as CUDA graphs if ``graphs`` is set and warm. ``offload`` moves saved activations of the first layers
    to host memory. ``weights`` fetches the layers' weights (FSDP or CPU offload) and frees them. ``made`` is called
    with each layer before the next one is created.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_numbers: Sequence[int],
        has_final_norm: bool,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
        experts: ExpertGroups | None = None,
        made: Callable[[nn.Module], None] = lambda layer: None,
    ) -> None:
        super().__init__()
        self.config = config
        self.shares_selected_keys = config.has_sparse_attention and not all(config.layers_with_indexer)
        self.layers = nn.ModuleDict()
        for number in layer_numbers:
            self.layers[str(number)] = layer = make_layer(config, number, tp, device, cp, experts)
            made(layer)
        self.final_layernorm = make_norm(config, tp, device) if has_final_norm else None
        self.tp = tp
        self.graphs: GraphedLayers | None = None
        self.offload: ActivationOffload | None = None
        self.weights: WeightPrefetch | None = None

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
        padding_mask: torch.Tensor | None = None,
        shared: SharedTensors | None = None,
    ) -> LayerOutput:
        """Return the hidden states after the last of these layers, and the auxiliary losses of all layers.

        Keys and values that later layers use are added to ``shared``. MoE layers ignore the positions of the whole
        sequences at which ``padding_mask: [b, s]`` is True.

        Raises:
            ConfigurationError: layers use dropout in training, and ``dropout`` is None, or CUDA graphs cannot capture
                the attention pattern.
        """
        losses: list[AuxiliaryLoss] = []
        units = partial(self.units, pattern, angles, cache, padding_mask, shared)
        if self.graphs is not None and self.layers and self.captures(pattern):
            x = self.graphs.run(lambda batch: units(), x, dropout)
        else:
            if self.graphs is not None and self.training:
                self.graphs.warm_up(self.layers.values())
            of_layers = () if shared is None else shared.tensors()
            x, found = self._run(units(), x, (*_tensors_of(angles), *of_layers), dropout)
            losses += found
        return LayerOutput(x if self.final_layernorm is None else self.final_layernorm(x), tuple(losses))

    def units(
        self,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        padding_mask: torch.Tensor | None = None,
        shared: SharedTensors | None = None,
    ) -> list[GraphUnit]:
        """Return each group of layers with the function that runs it; `forward` describes the arguments."""
        if self.shares_selected_keys and pattern.selected is None:
            pattern = replace(pattern, selected=SelectedKeys())
        selected = pattern.selected

        def run(
            group: list[TransformerLayer],
            hidden: torch.Tensor,
            keys: DropoutKeys | None,
            common: SharedTensors | None = shared,
        ) -> LayerOutput:
            losses_of_group: list[AuxiliaryLoss] = []
            ahead = NormAhead()
            # A layer's last residual addition is fused with the next layer's first norm.
            for layer, following in zip(group, (*group[1:], None)):
                ahead.following = None if following is None else following.input_layernorm
                hidden, found = layer(hidden, pattern, angles, cache, keys, ahead, padding_mask, common)
                losses_of_group += found
            return LayerOutput(hidden, tuple(losses_of_group))

        def run_again(group: list[TransformerLayer], hidden: torch.Tensor, keys: DropoutKeys | None) -> LayerOutput:
            """Run with recomputation: save only the input, or this rank's part of it."""
            in_parts = self.config.distribute_saved_activations
            mask = None if selected is None else selected.mask
            before = None if shared is None else shared.copy()

            def run_as_before(
                group: list[TransformerLayer],
                hidden: torch.Tensor,
                keys: DropoutKeys | None,
                before: SharedTensors | None,
            ) -> tuple[LayerOutput, SharedTensors | None]:
                """Run with the keys that earlier layers selected, and with a copy of the shared tensors."""
                if selected is not None:
                    selected.mask = mask
                common = None if before is None else before.copy()
                return run(group, hidden, keys, common), common

            with saved_in_parts(hidden, self.tp) if in_parts else nullcontext():
                output, after = recompute(run_as_before, group, hidden, keys, before)
            if shared is not None and after is not None:
                shared.add(after)
            return output

        joins_kept = self.graphs is None and self.offload is None and self.weights is None
        return [
            GraphUnit(group, partial(run_again if is_again else run, group))
            for group, is_again in self._groups(joins_kept)
        ]

    def captures(self, pattern: AttentionPattern) -> bool:
        """Return whether a forward pass with this attention pattern runs CUDA graphs.

        Raises:
            ConfigurationError: it does, and the pattern differs between micro-batches.
        """
        if self.graphs is None or not self.training or not self.graphs.is_warm:
            return False
        if pattern.document_ids is not None or pattern.mask is not None:
            raise ConfigurationError(
                "--cuda-graph-impl local: attention depends on document boundaries or a mask, which differ "
                "between micro-batches; omit it"
            )
        return True

    def _run(
        self, units: Sequence[GraphUnit], x: torch.Tensor, kept: Sequence[torch.Tensor], dropout: DropoutKeys | None
    ) -> LayerOutput:
        """Run the units in order, offloading the saved activations of the first ones if configured.

        The tensors ``kept`` of all layers stay on the device.
        """
        losses: list[AuxiliaryLoss] = []
        offloaded, last = None, self._num_offloaded(units)
        if last and self.offload is not None and torch.is_grad_enabled():
            offloaded = self.offload.begin_pass(kept)
        for number, unit in enumerate(units):
            parameters = (parameter for module in unit.modules for parameter in module.parameters())
            with nullcontext() if offloaded is None or number >= last else offloaded.layer(parameters):
                before = x
                if self.weights is not None:
                    self.weights.enter(unit.modules)
                x, found = unit.run(x, dropout)
                if self.weights is not None:
                    self.weights.exit(unit.modules, before, x)
                del before
            losses += found
            if offloaded is not None and number == min(last, len(units) - 1):
                offloaded.end(x)
        return LayerOutput(x, tuple(losses))

    def _num_offloaded(self, units: Sequence[GraphUnit]) -> int:
        """Return the number of units, from the first, that start among the offloaded layers."""
        if self.offload is None or not self.training:
            return 0
        starts = accumulate((len(unit.modules) for unit in units), initial=0)
        return sum(start < self.offload.num_layers for start, _ in zip(starts, units))

    def _groups(self, joins_kept: bool) -> Iterator[tuple[list[TransformerLayer], bool]]:
        """Yield groups of layers in order, and whether the group is recomputed as a whole.

        Layers without full recomputation form one group if ``joins_kept``, else one group each.
        """
        layers = [cast("TransformerLayer", layer) for layer in self.layers.values()]
        length, num_again = 1, 0
        if self.training and self.config.recompute_granularity == "full":
            number = self.config.recompute_num_layers or 1
            is_block = self.config.recompute_method == "block"
            length, num_again = (1, min(number, len(layers))) if is_block else (number, len(layers))
        for start in range(0, num_again, length):
            yield layers[start : start + length], True
        step = max(len(layers), 1) if joins_kept else 1
        for start in range(num_again, len(layers), step):
            yield layers[start : start + step], False


def _tensors_of(angles: RotaryAngles | None) -> Iterator[torch.Tensor]:
    """Yield the tensors that all layers share."""
    while angles is not None:
        yield angles.cos
        yield angles.sin
        if angles.query_scale is not None:
            yield angles.query_scale
        angles = angles.local
