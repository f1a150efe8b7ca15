"""The GPT model: embedding, transformer layers and vocabulary-parallel output layer, or one pipeline stage.

It also scales the initialization of hidden matrices for muP (Yang et al. 2022, https://arxiv.org/abs/2203.03466) and
computes the z-loss of the logits (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.errors import ConfigurationError
from megatron.core.host_memory import ReusedMemory
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.main_grad import gradient_uses_of, set_gradient_uses
from megatron.core.models import Model
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.ops import CAUSAL, AttentionPattern, DropoutKeys, DropoutSamples
from megatron.core.parallel_state import ExpertGroups, ParallelState
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group, single_rank_group
from megatron.core.registry import find_registered
from megatron.core.sharding import ParamSpec, attach_spec, spec_of, tie_over_pipeline
from megatron.core.tensor_parallel import (
    ColumnShardedLinear,
    InputRegion,
    LossInputs,
    RngStreams,
    VocabShardedEmbedding,
    embedding_lookup,
    linear_cross_entropy,
    linear_overlap,
    make_parameter,
    replicated_spec,
    tensor_parallel_linear,
    vocab_sharded_cross_entropy,
)
from megatron.core.transformer import (
    ADAPTERS,
    INDEXER_LOSS,
    GraphedLayers,
    GraphUnit,
    HiddenDropout,
    KeyValueCache,
    MultiTokenPrediction,
    PerLayerInputs,
    RotaryAngles,
    RotaryEmbedding,
    SharedTensors,
    TransformerBlock,
    add_adapters,
    factor_frequencies,
    further_layer_numbers,
    further_loss_names,
    further_losses,
    keys_of_rank,
    make_norm,
    mtp_targets,
    proportional_frequencies,
    quantize_base,
    read_message,
    require_keys,
    split_inputs,
    write_message,
    yarn_frequencies,
)
from megatron.core.transformer.moe import auxiliary_loss_names
from megatron.core.weight_prefetch import free_storage


class PositionEmbedding(nn.Module):
    """Learned position embedding; under sequence parallelism each rank looks up its own part of the sequence.

    Shapes: ``position_ids: [b, s] -> [s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism).
    """

    def __init__(self, config: GPTConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = config.sequence_parallel
        self.offset = config.position_embedding_offset
        shape = (config.num_position_embeddings, config.hidden_size)
        spec = replicated_spec("weight", shape, tp, config.sequence_parallel, std=config.embedding_init_std)
        self.weight = make_parameter(shape, spec, dtype_from_name(config.params_dtype), device)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the position embeddings, sequence first."""
        positions = _own_positions(position_ids, self.tp, self.sequence_parallel) + self.offset
        return embedding_lookup(positions, self.weight)


def _own_positions(position_ids: torch.Tensor, tp: Group, sequence_parallel: bool) -> torch.Tensor:
    """Return the positions whose hidden states this rank holds. Shapes: ``[b, s] -> [s, b]``, or ``[s/tp, b]``."""
    positions = position_ids.t()
    if not sequence_parallel:
        return positions
    length = positions.shape[0] // tp.size
    return positions.narrow(0, tp.rank * length, length)


class SinusoidalEmbedding(nn.Module):
    """Sines, then cosines of the positions at frequencies from 1 to 1/10000, as in tensor2tensor and fairseq.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, have the same frequencies, but not all sines first.

    Shapes: ``position_ids: [b, s] -> [s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism).
    """

    def __init__(self, config: GPTConfig, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = config.sequence_parallel
        self.offset, self.width = config.position_embedding_offset, config.hidden_size
        self.dtype = dtype_from_name(config.params_dtype)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the position embeddings, sequence first, computed in at least float32."""
        positions = _own_positions(position_ids, self.tp, self.sequence_parallel) + self.offset
        wide, half = arithmetic_dtype(self.dtype), self.width // 2
        exponents = torch.arange(half, device=positions.device, dtype=wide) * -(math.log(10000.0) / (half - 1))
        angles = positions[..., None].to(wide) * exponents.exp()
        return F.pad(torch.cat((angles.sin(), angles.cos()), dim=-1), (0, self.width % 2)).to(self.dtype)


class GPTEmbedding(nn.Module):
    """Embedding of tokens and of learned or sinusoidal positions, if configured, with an optional norm.

    Shapes: ``tokens, position_ids: [b, s] -> [s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism).
    """

    def __init__(self, config: GPTConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.word_embeddings = VocabShardedEmbedding(
            config.vocab_size,
            config.padded_vocab_size,
            config.hidden_size,
            tp,
            sequence_parallel=config.sequence_parallel,
            init_std=config.embedding_init_std,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
        )
        self.scale: float | None = None
        if config.scale_embeddings:
            # Rounded to the embeddings' dtype, as in the training of existing models; a Python number needs no copy per
            # step.
            dtype = dtype_from_name(config.params_dtype)
            self.scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
        self.multiplier = config.embedding_multiplier * config.mup.mup_embedding_mult
        if self.multiplier != 1.0:
            self.scale = self.multiplier * (1.0 if self.scale is None else self.scale)
        self.position_embeddings: nn.Module | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(config, tp, device)
        elif config.position_embedding_type == "sinusoidal":
            self.position_embeddings = SinusoidalEmbedding(config, tp)
        self.norm = make_norm(config, tp, device) if config.add_embedding_norm else None
        self.per_layer: PerLayerInputs | None = None
        if config.hidden_size_per_layer_input:
            sizes = config.vocab_size, config.padded_vocab_size
            self.per_layer = PerLayerInputs(config, *sizes, config.embedding_init_std, tp, device)
        self.dropout = HiddenDropout(config.dropout_of_embeddings)

    def of_words(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the word embeddings, without positions and dropout."""
        hidden: torch.Tensor = self.word_embeddings(tokens)
        return hidden if self.scale is None else hidden * self.scale

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None, dropout: DropoutKeys | None = None
    ) -> torch.Tensor:
        """Return the first hidden states; ``position_ids`` are for learned positions.

        Raises:
            ConfigurationError: dropout is active in training, and ``dropout`` is None.
        """
        hidden = self.of_words(tokens)
        if self.position_embeddings is not None:
            assert position_ids is not None, "learned and sinusoidal positions are added"
            positions = self.position_embeddings(position_ids)
            hidden = hidden + (positions if self.multiplier == 1.0 else positions * self.multiplier)
        if self.norm is not None:
            hidden = self.norm(hidden)
        keys = require_keys(dropout).of_embedding if self.dropout.is_active else None
        output: torch.Tensor = self.dropout(hidden, keys)
        return output


_NOT_HIDDEN = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight", "conv1d.weight")


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Return whether a parameter is a hidden matrix for muP: no embedding, output layer,
    convolution, vector or adapter."""
    is_matrix = len(spec.global_shape) >= 2 and not spec.name.endswith(("bias", *_NOT_HIDDEN))
    return is_matrix and ADAPTERS not in spec.name


def scale_with_width(parameters: Iterable[nn.Parameter], width_multiplier: float) -> None:
    """Scale the initial values of hidden matrices for muP, and set the multiplier for the optimizer.

    Must be called after the parameters are named, and before they are initialized.
    """
    for parameter in parameters:
        spec = spec_of(parameter)
        if is_hidden_matrix(spec):
            std = spec.init_std / width_multiplier**0.5
            attach_spec(parameter, replace(spec, init_std=std, width_multiplier=width_multiplier))


LOGIT_Z_LOSS = "logit_z_loss"
"""Log name of the mean of the squared log-sum-exps, without its coefficient."""


def logit_z_loss(
    log_normalizers: torch.Tensor, loss_mask: torch.Tensor | None, coefficient: float, cp: Group
) -> AuxiliaryLoss:
    """Return the z-loss of the unmasked tokens; collective over context parallelism.

    Shapes: ``log_normalizers, loss_mask: [b, s/cp]``.
    """
    squares = log_normalizers.square()
    counts = torch.ones_like(squares) if loss_mask is None else (loss_mask != 0).to(squares.dtype)
    num_tokens = counts.sum()
    all_reduce(num_tokens, cp)
    return AuxiliaryLoss(LOGIT_Z_LOSS, (squares * counts).sum(), num_tokens / cp.size, coefficient)


_WORD_EMBEDDING = "embedding.word_embeddings"


class GPTModel(Model):
    """GPT model chunk: embedding (``pre_process``), layers ``layer_numbers``, and output layer (``post_process``).

    The default is the whole model. Parameters have a `ParamSpec` with their sharding. On a real device they are
    initialized from ``seed`` (``None`` leaves zeros, for a checkpoint to fill), on ``meta`` they only have shapes. With
    ``fills_later`` they have no memory: `wrap_model` initializes this rank's shards, and at most one layer is ever
    whole. Sequences are whole unless ``cp`` is the group over which `context_parallel.partition` has split them, and
    all experts are on every rank unless ``experts`` gives their distribution. With ``parallel_state`` the ranks that
    hold the same parameters divide the generation of initial values, and the constructor is collective over them.
    """

    config: GPTConfig

    def __init__(
        self,
        config: GPTConfig,
        tp: Group,
        rng: RngStreams,
        *,
        seed: int | None,
        device: torch.device | str = "cpu",
        layer_numbers: Sequence[int] | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        cp: Group | None = None,
        experts: ExpertGroups | None = None,
        fills_later: bool = False,
        parallel_state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        self.parallel_state = parallel_state
        self.tp = tp
        self.rng = rng
        self.cp = single_rank_group(("cp",)) if cp is None else cp
        self.pre_process = pre_process
        self.post_process = post_process
        self.has_further_tokens = post_process and config.mtp.mtp_depth > 0
        self.embedding = GPTEmbedding(config, tp, device) if pre_process or self.has_further_tokens else None
        self.layer_numbers = range(config.num_layers) if layer_numbers is None else layer_numbers
        experts = experts or ExpertGroups.like_dense(tp, self.cp)
        made = free_storage if fills_later else _keep_memory
        if config.lora_base_quantization is not None:
            # At most one layer is ever in full precision.
            made = partial(quantize_base, config=config)
        made(self)
        self.decoder = TransformerBlock(config, self.layer_numbers, post_process, tp, device, self.cp, experts, made)
        self.mtp: MultiTokenPrediction | None = None
        if self.has_further_tokens:
            self.mtp = MultiTokenPrediction(config, tp, device, self.cp, experts, made)
        names = (*auxiliary_loss_names(config.moe), *further_loss_names(config.mtp))
        of_indexers = (INDEXER_LOSS,) if config.mla.dsa_indexer_loss_coeff else ()
        of_logits = (LOGIT_Z_LOSS,) if config.z_loss_coeff else ()
        self.auxiliary_loss_names = (*names, *of_indexers, *of_logits)
        self._logits_memory = ReusedMemory()
        self.output_layer: ColumnShardedLinear | None = None
        is_tied = not config.untie_embeddings_and_output_weights
        if post_process and not (is_tied and self.embedding is not None):
            self.output_layer = ColumnShardedLinear(
                config.hidden_size,
                config.vocab_size,
                tp,
                config=config,
                init_std=config.embedding_init_std if is_tied else config.init_method_std,
                bias=config.add_output_bias,
                device=device,
                padded_output_size=config.padded_vocab_size,
                tp_comm_buffer_name="output",
            )
        if self.embedding is not None:
            # Used as embedding, as embedding of the MTP modules, and as output layer.
            uses = pre_process + self.has_further_tokens + (post_process and is_tied)
            set_gradient_uses(self.embedding.word_embeddings.weight, uses)
        self.rotary, self.local_rotary = _make_rotary(config.of_global_layers), _make_local_rotary(config)
        if config.lora_rank:
            add_adapters(self, config, tp, device)
        self.name_parameters()
        if (is_tied or config.mtp.mtp_depth) and pre_process != post_process:
            # Both ends of the pipeline hold a copy of the word embedding.
            weight = self.output_weight if self.embedding is None else self.embedding.word_embeddings.weight
            tied = tie_over_pipeline(spec_of(weight), name=f"{_WORD_EMBEDDING}.weight", is_first_stage=pre_process)
            attach_spec(weight, tied)
        if config.mup.use_mup:
            scale_with_width(self.parameters(), config.width_multiplier)
        made(self)
        if not fills_later:
            self.initialize_parameters(seed)

    @property
    def captures_loss(self) -> bool:
        """Return whether CUDA graphs capture embedding and loss (``--loss-cuda-graph``)."""
        return self.decoder.graphs is not None and self.decoder.graphs.with_ends

    @property
    def first_alone(self) -> nn.Module | None:
        """Return the embedding if no other module uses it (output layer, MTP) and its backward pass needs no weight."""
        if self.embedding is None or not self.pre_process:
            return None
        if self.embedding.norm is not None or self.embedding.per_layer is not None:
            return None
        return self.embedding if gradient_uses_of(self.embedding.word_embeddings.weight) == 1 else None

    @property
    def output_weight(self) -> nn.Parameter:
        """Return the weight of the output layer: its own, or the tied word embedding."""
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None, "a last stage without the embedding has an output layer"
        return self.embedding.word_embeddings.weight

    def forward(
        self,
        tokens: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        *,
        labels: torch.Tensor | None = None,
        pattern: AttentionPattern = CAUSAL,
        hidden: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        last_position_only: bool = False,
        dropout_samples: DropoutSamples | None = None,
        losses: list[AuxiliaryLoss] | None = None,
        loss_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        sequence_lengths: int | torch.Tensor | None = None,
        shared: SharedTensors | None = None,
        reduction: Literal["none", "sum"] = "none",
    ) -> torch.Tensor:
        """Return the loss of every token, the logits if there are no labels, or a stage's message.

        With ``reduction`` "sum" the loss is the sum over tokens, weighted by ``loss_mask``.

        ``pattern`` determines which positions each position attends to. ``hidden`` is the previous stage's output. If
        tensors that layers share are passed as ``shared``, ``hidden`` and a stage's output are hidden states only.
        ``last_position_only`` computes only the logits of the last position (``s`` is then 1 in their shape), for
        generation. The layers' auxiliary losses are appended to ``losses`` if it is given. In training so are the MTP
        losses, in which tokens masked by ``loss_mask`` do not count as labels.

        ``dropout_samples`` determine the dropout masks in training. Without them every call draws a number from torch's
        CPU generator, and masks are the same only across tensor- and context-parallel layouts.

        MoE layers ignore the positions at which ``padding_mask`` is True. The mask covers whole sequences, also under
        context parallelism. Pass it to every stage with experts.

        LongRoPE chooses its factors by ``sequence_lengths``, one for all rows or one each. Without them it is the
        length of the given sequence, which only with ``cache`` is not the whole one.

        ``tokens`` are for the chunk with the embedding, ``labels`` for the chunk with the output layer, and
        ``position_ids`` for the embedding and, with RoPE, for all chunks.

        Shapes: ``tokens, position_ids, labels, loss_mask, padding_mask: [b, s]``; ``sequence_lengths: [b]``; loss
        ``-> [b, s]`` or ``[]`` float32; logits ``-> [s, b, v/tp]``; a message ``-> [s, b, h]`` (``[s/tp, b, h]`` under
        sequence parallelism), wider if layers share tensors (`DecoderConfig.message_widths`).

        Raises:
            ConfigurationError: CUDA graphs are to capture the loss, and there are no labels.
        """
        graphs = self.decoder.graphs
        if graphs is not None and self.captures_loss and self.training and (self.pre_process or self.post_process):
            if self.decoder.captures(pattern):
                batch = self._static_batch(tokens, position_ids, labels, loss_mask, reduction)
                return self._run_captured(graphs, batch, position_ids, hidden, pattern, dropout_samples)
            graphs.warm_up((self,))
        if self.pre_process:
            assert self.embedding is not None, "the first stage embeds tokens"
            assert tokens is not None, "the first stage is given tokens"
            dropout = self._dropout(dropout_samples, tokens.t())
            hidden = self.embedding(tokens, position_ids, dropout)
        else:
            assert hidden is not None, "a later stage is given the previous stage's output"
            dropout = self._dropout(dropout_samples, hidden)
        uses_messages = shared is None and self.config.shares_tensors
        if uses_messages:
            hidden, shared = self._with_shared(tokens, hidden, cache)
        angles = self.angles(position_ids, hidden.dtype, sequence_lengths)
        hidden, found = self.decoder(hidden, pattern, angles, cache, dropout, padding_mask, shared)
        if losses is not None:
            losses += found
        if not self.post_process:
            return write_message(hidden, shared, self.config) if uses_messages and shared is not None else hidden
        if last_position_only:
            assert not self.config.sequence_parallel, "the last position is on one rank only"
            hidden = hidden[-1:]
        if labels is None:
            return self._logits(hidden, None)
        if losses is None or not self.training:
            return _reduced(self._loss(hidden, labels), loss_mask, reduction)
        if self.mtp is None:
            return _reduced(self._loss(hidden, labels, losses, loss_mask), loss_mask, reduction)
        assert self.embedding is not None, "tokens of MTP modules are embedded"
        targets = mtp_targets(labels, loss_mask, pattern.document_ids, self.config.mtp.mtp_depth, self.cp)
        embedded = self.embedding.of_words(targets.tokens.flatten(0, 1))
        states, found = self.mtp(hidden, embedded, pattern, angles, dropout, padding_mask)
        losses += found
        # All logits are one GEMM, and use the output layer's weight once.
        all_labels = torch.cat((labels, *targets.labels))
        per_token = self._loss(torch.cat((hidden, *states), dim=1), all_labels, losses, loss_mask, len(labels))
        own, *further = per_token.chunk(1 + len(states))
        losses += further_losses(further, targets, self.config.mtp, self.cp)
        return _reduced(own, loss_mask, reduction)

    def _static_batch(
        self,
        tokens: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
        reduction: Literal["none", "sum"],
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a micro-batch that this chunk's embedding and loss read."""
        if self.post_process and labels is None:
            raise ConfigurationError(
                "--loss-cuda-graph: the forward step passes no labels, so the model computes no loss to capture; omit "
                "the flag"
            )
        has_positions = self.embedding is not None and self.embedding.position_embeddings is not None
        read = {
            "tokens": tokens if self.pre_process else None,
            "position_ids": position_ids if self.pre_process and has_positions else None,
            "labels": labels if self.post_process else None,
            "loss_mask": loss_mask if self.post_process and reduction == "sum" else None,
        }
        return {name: tensor for name, tensor in read.items() if tensor is not None}

    def _run_captured(
        self,
        graphs: GraphedLayers,
        batch: Mapping[str, torch.Tensor],
        position_ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        pattern: AttentionPattern,
        dropout_samples: DropoutSamples | None,
    ) -> torch.Tensor:
        """Run the chunk as CUDA graphs, with embedding and loss; `forward` describes the arguments and the result."""
        first = batch["tokens"].t() if hidden is None else hidden
        dtype = dtype_from_name(self.config.params_dtype) if hidden is None else hidden.dtype

        def units(static: Mapping[str, torch.Tensor]) -> list[GraphUnit]:
            found = self.decoder.units(pattern, self.angles(position_ids, dtype))
            if self.pre_process:
                found.insert(0, self._embedding_unit(static))
            return [*found, self._loss_unit(static)] if self.post_process else found

        output = graphs.run(units, hidden, self._dropout(dropout_samples, first), batch)
        # The next micro-batch overwrites static memory, but losses may be kept.
        return output.clone() if self.post_process else output

    def _embedding_unit(self, static: Mapping[str, torch.Tensor]) -> GraphUnit:
        embedding = self.embedding
        assert embedding is not None, "the first stage embeds tokens"

        def run(before: None, dropout: DropoutKeys | None) -> LayerOutput:
            return LayerOutput(embedding(static["tokens"], static.get("position_ids"), dropout), ())

        return GraphUnit((embedding,), run)

    def _loss_unit(self, static: Mapping[str, torch.Tensor]) -> GraphUnit:
        norm, loss_mask = self.decoder.final_layernorm, static.get("loss_mask")

        def run(hidden: torch.Tensor, dropout: DropoutKeys | None) -> LayerOutput:
            per_token = self._loss(hidden if norm is None else norm(hidden), static["labels"])
            return LayerOutput(per_token if loss_mask is None else _reduced(per_token, loss_mask, "sum"), ())

        modules = [module for module in (norm, self.output_layer) if module is not None]
        return GraphUnit(modules, run, () if self.output_layer is not None else (self.output_weight,))

    def _with_shared(
        self, tokens: torch.Tensor | None, given: torch.Tensor, cache: KeyValueCache | None
    ) -> tuple[torch.Tensor, SharedTensors]:
        """Return the hidden states and the tensors that layers share: computed here, or read from a stage's message."""
        if not self.pre_process:
            return read_message(given, self.config, self.layer_numbers, cache)
        assert self.embedding is not None, "the first stage embeds tokens"
        per_layer = self.embedding.per_layer
        if per_layer is None:
            return given, SharedTensors()
        assert tokens is not None, "the first stage is given tokens"
        return given, SharedTensors(split_inputs(per_layer(tokens, given), self.config))

    def _loss(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        losses: list[AuxiliaryLoss] | None = None,
        loss_mask: torch.Tensor | None = None,
        num_own: int | None = None,
    ) -> torch.Tensor:
        """Return the loss of every token, and add the z-loss of the first ``num_own`` sequences to ``losses``.

        The other sequences are those of the multi-token prediction (MTP) modules.

        Shapes: ``hidden: [s, b, h], labels: [b, s], loss_mask: [num_own, s] -> [b, s]``.
        """
        vocab_size, coefficient = self.config.vocab_size, self.config.z_loss_coeff
        if self.config.cross_entropy_fusion_impl == "linear":
            chunked, log_normalizers = self._chunked_loss(hidden, labels.t())
            if losses is not None and coefficient:
                losses.append(logit_z_loss(log_normalizers.t()[:num_own], loss_mask, coefficient, self.cp))
            return chunked.t()
        logits = self._logits(hidden, self._logits_memory)
        is_own = self.config.loss != "cross_entropy"
        if losses is None or not (coefficient or is_own):
            return vocab_sharded_cross_entropy(logits, labels.t(), vocab_size, self.tp).t()
        inputs = LossInputs(logits, labels.t(), vocab_size, self.tp)
        per_token = self._registered_loss(inputs) if is_own else inputs.cross_entropy()
        if coefficient:
            losses.append(logit_z_loss(inputs.log_normalizers().t()[:num_own], loss_mask, coefficient, self.cp))
        return per_token.t()

    def _chunked_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses and the log-sum-exps without all logits at once. Shapes: ``-> [s, b], [s, b]``."""
        factor = self.config.logit_multiplier
        hidden = hidden if factor == 1.0 else hidden * factor
        region = InputRegion.SEQUENCE if self.config.sequence_parallel else InputRegion.REPLICATED

        def fused(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            library = self.config.cpu_gemm_backend
            return linear_cross_entropy(x, weight, labels, self.config.vocab_size, region, self.tp, library)

        if self.output_layer is None:
            return fused(hidden, self.output_weight)
        both: tuple[torch.Tensor, torch.Tensor] = self.output_layer(hidden, fused=fused)
        return both

    def _registered_loss(self, inputs: LossInputs) -> torch.Tensor:
        """Return the loss of every token by the registered function. Shapes: ``-> [s, b]``.

        Raises:
            ConfigurationError: the function returns anything but a loss per token.
        """
        name = self.config.loss
        per_token = find_registered("loss", name).value(inputs)
        if not isinstance(per_token, torch.Tensor) or per_token.shape != inputs.labels.shape:
            found = list(per_token.shape) if isinstance(per_token, torch.Tensor) else type(per_token).__name__
            raise ConfigurationError(
                f"--loss {name} returned {found}; a loss per token of shape {list(inputs.labels.shape)}, [s, b], is "
                "expected"
            )
        return per_token

    def _dropout(self, samples: DropoutSamples | None, first: torch.Tensor) -> DropoutKeys | None:
        """Return the dropout keys of a chunk whose first input is ``first: [s, b, …]``, or None without dropout."""
        if not self.training or not self.config.draws_by_sample:
            return None
        length, batch = first.shape[:2]
        if self.config.sequence_parallel and not self.pre_process:
            length *= self.tp.size
        if samples is None:
            samples = self.rng.draw_dropout_samples(batch, first.device)
        numbers = (*self.layer_numbers, *(further_layer_numbers(self.config) if self.has_further_tokens else ()))
        return keys_of_rank(samples, numbers, length, self.tp, self.cp, self.config.sequence_parallel)

    def angles(
        self, position_ids: torch.Tensor | None, dtype: torch.dtype, lengths: int | torch.Tensor | None = None
    ) -> RotaryAngles | None:
        """Return the rotary angles of positions, None if the model has none. Shapes: ``position_ids: [b or 1, s]``."""
        if self.rotary is None:
            return None
        assert position_ids is not None, "rotary positions are needed on every stage"
        if self.config.longrope_length is not None and lengths is None:
            lengths = position_ids.shape[1] * self.cp.size
        angles = self.rotary.angles(position_ids, dtype, lengths)
        if self.local_rotary is None:
            return angles
        return replace(angles, local=self.local_rotary.angles(position_ids, dtype))

    def _logits(self, hidden: torch.Tensor, memory: ReusedMemory | None) -> torch.Tensor:
        factor = self.config.logit_multiplier
        logits = self._raw_logits(hidden if factor == 1.0 else hidden * factor, memory)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _raw_logits(self, hidden: torch.Tensor, memory: ReusedMemory | None) -> torch.Tensor:
        if self.output_layer is not None:
            # Called as a module, so that its hooks wait for parameters that are still being gathered.
            logits: torch.Tensor = self.output_layer(hidden, memory=memory)
            return logits
        region = InputRegion.SEQUENCE if self.config.sequence_parallel else InputRegion.REPLICATED
        library, overlap = self.config.cpu_gemm_backend, linear_overlap(self.config, "output")
        return tensor_parallel_linear(
            hidden, self.output_weight, None, region, self.tp, library=library, overlap=overlap, memory=memory
        )


def _reduced(
    per_token: torch.Tensor, loss_mask: torch.Tensor | None, reduction: Literal["none", "sum"]
) -> torch.Tensor:
    """Reduce the losses of tokens. Shapes: ``[b, s] -> [b, s]``, or ``[]`` for a sum."""
    if reduction == "none":
        return per_token
    return (per_token if loss_mask is None else per_token * loss_mask.to(per_token.dtype)).sum()


def _keep_memory(module: nn.Module) -> None:
    """Do nothing: keep the memory of a newly created part of the model."""


def _make_rotary(config: GPTConfig) -> RotaryEmbedding | None:
    if config.position_embedding_type != "rope":
        return None
    width = config.mla.qk_pos_emb_head_dim if config.mla.multi_latent_attention else config.rotary_width
    base = config.scaled_rotary_base
    stretched = yarn_frequencies(config.rope, base, width) if config.stretches_positions else None
    if config.rope.rope_type == "proportional":
        stretched = proportional_frequencies(base, width, config.rotary_dim)
    if config.mla.multi_latent_attention:
        return RotaryEmbedding(
            width,
            base,
            interleaved=True,
            frequencies=stretched,
            amplitude=config.rotary_amplitude,
        )
    if config.longrope_length is not None:
        short, long = (factor_frequencies(base, factors) for factors in config.longrope_factors)
        return RotaryEmbedding(
            width,
            base,
            interleaved=config.rotary_interleaved,
            frequencies=short,
            long_frequencies=long,
            original_length=config.longrope_length,
            amplitude=config.longrope_attention_factor,
        )
    return RotaryEmbedding(
        width,
        base,
        interleaved=config.rotary_interleaved,
        frequencies=stretched,
        amplitude=config.rotary_amplitude,
        interpolation_factor=config.rotary_seq_len_interpolation_factor,
        scaling_factor=config.rope_scaling_factor if config.use_rope_scaling else None,
        low_frequency_factor=config.rope_scaling_low_freq_factor,
        high_frequency_factor=config.rope_scaling_high_freq_factor,
        original_length=config.rope_scaling_original_max_position_embeddings,
        temperature=config.attention_temperature,
    )


def _make_local_rotary(config: GPTConfig) -> RotaryEmbedding | None:
    """Return the rotary embedding of layers with a window, None if all layers have the same."""
    own = config.of_windowed_layers
    if config.position_embedding_type != "rope" or config.rotary_base_local is None:
        return None if own.kv_channels == config.of_global_layers.kv_channels else _make_rotary(own)
    return RotaryEmbedding(
        own.rotary_width,
        config.rotary_base_local,
        interleaved=config.rotary_interleaved,
        temperature=config.attention_temperature,
    )
