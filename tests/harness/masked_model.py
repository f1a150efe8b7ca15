"""A second kind of model: an encoder that looks in both directions and learns to fill in masked tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import pretrain_gpt
from megatron.config.run_config import RunConfig
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.datasets.gpt_dataset import GPTSample, SampleDataset
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTEmbedding
from megatron.core.models.model import Model
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.tensor_parallel.cross_entropy import vocab_sharded_cross_entropy
from megatron.core.tensor_parallel.sharded_layers import ColumnShardedLinear
from megatron.core.transformer.dropout import keys_of_rank
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training.data_plan import DatasetSplitsBuilder
from megatron.training.exit_reason import launch_environment_or_exit, parse_arguments_or_exit
from megatron.training.initialize import Runtime
from megatron.training.preflight import prepare_data_or_exit
from megatron.training.pretraining import pretrain_from_config
from tests.harness.faults import Faults
from tests.harness.penalized_layers import penalize

MASKED_SHARE = 0.3
BOTH_DIRECTIONS = AttentionPattern(is_causal=False)


class EncoderConfig(GPTConfig):
    """Configure an encoder by the flags of a GPT."""

    def forward_flops_per_sequence(self, seq_length: int) -> float:
        """Return the operations of one forward pass; all of the score matrix is used."""
        unused_by_causal = 2.0 * seq_length * self.num_layers * self.query_projection_size * seq_length
        return super().forward_flops_per_sequence(seq_length) + unused_by_causal


class MaskedModel(Model):
    """Embed, encode, and say for every position which token belongs there."""

    def __init__(self, config: GPTConfig, runtime: Runtime, contents: StageContents, seed: int | None) -> None:
        super().__init__()
        tp, device = runtime.state.tp, runtime.device.torch_device
        self.cp, self.layer_numbers = runtime.state.cp, contents.layer_numbers
        self.config, self.tp, self.vocab_size = EncoderConfig(**vars(config)), tp, config.vocab_size
        self.pre_process, self.post_process = contents.has_embedding, contents.has_loss
        self.embedding = GPTEmbedding(config, tp, device) if self.pre_process else None
        self.encoder = TransformerBlock(config, contents.layer_numbers, self.post_process, tp, device, runtime.state.cp)
        self.head: ColumnShardedLinear | None = None
        if self.post_process:
            self.head = ColumnShardedLinear(
                config.hidden_size,
                config.vocab_size,
                tp,
                config=config,
                init_std=config.init_method_std,
                bias=True,
                device=device,
                padded_output_size=config.padded_vocab_size,
            )
        self.name_parameters()
        self.initialize_parameters(seed)

    def forward(
        self, tokens: Any, positions: Any, labels: Any, hidden: Any, dropout_samples: Any = None
    ) -> tuple[torch.Tensor, tuple[AuxiliaryLoss, ...]]:
        """Return the loss of every token, or the chunk's hidden states; and the layers' auxiliary losses."""
        is_split, size = self.config.sequence_parallel, self.tp.size
        length = hidden.shape[0] * (size if is_split else 1) if self.embedding is None else tokens.shape[1]
        dropout = keys_of_rank(dropout_samples, self.layer_numbers, length, self.tp, self.cp, is_split)
        if self.embedding is not None:
            hidden = self.embedding(tokens, positions, dropout)
        hidden, losses = self.encoder(hidden, BOTH_DIRECTIONS, None, dropout=dropout)
        if self.head is None:
            return hidden, losses
        logits = self.head(hidden)
        return vocab_sharded_cross_entropy(logits, labels.t(), self.vocab_size, self.tp).t(), losses


def provide_model(config: RunConfig, runtime: Runtime, contents: StageContents) -> Model:
    """Return one chunk of the encoder, with an auxiliary loss in every layer."""
    return penalize(MaskedModel(config.model, runtime, contents, config.initialization.seed))


def forward_step(batch: Any, model: Model, hidden: torch.Tensor | None) -> ChunkResult:
    """Return the loss of the masked positions."""
    output, losses = model(batch.tokens, batch.position_ids, batch.labels, hidden, batch.dropout_samples)
    if not model.post_process:
        return LayerOutput(output, losses)
    num_tokens = batch.num_tokens / model.config.context_parallel_size
    return MicrobatchLoss((output * batch.loss_mask).sum(), num_tokens, losses)


class MaskedSamples:
    """Hide some tokens of each sample behind the last id of the vocabulary; they are its labels."""

    def __init__(self, dataset: SampleDataset, mask_id: int) -> None:
        self._dataset = dataset
        self._mask_id = mask_id
        self.source_of = dataset.source_of

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> GPTSample:
        sample = self._dataset[index]
        text = sample["tokens"]
        is_masked = np.random.default_rng(index).random(len(text)) < MASKED_SHARE
        tokens = np.where(is_masked, self._mask_id, text)
        return {**sample, "tokens": tokens, "labels": text, "loss_mask": is_masked.astype(np.float32)}


class MaskedSamplesBuilder:
    """Build the data sets that another builder makes, with masks."""

    def __init__(self, builder: DatasetSplitsBuilder, mask_id: int) -> None:
        self.check = builder.check
        self._builder = builder
        self._mask_id = mask_id

    def build(self) -> DatasetSplits:
        splits = self._builder.build()
        names = [name for name in ("train", "valid", "test") if getattr(splits, name) is not None]
        masked = {name: MaskedSamples(getattr(splits, name), self._mask_id) for name in names}
        return dataclasses.replace(splits, **masked)


def run(argv: Sequence[str], faults: Faults) -> int:
    """Train the encoder as ``pretrain_gpt.py`` trains a GPT; return the exit status."""

    def provide_datasets(config: RunConfig, tokenizer: Any, *more: Any) -> MaskedSamplesBuilder:
        return MaskedSamplesBuilder(pretrain_gpt.provide_datasets(config, tokenizer, *more), tokenizer.vocab_size - 1)

    launch = launch_environment_or_exit()
    config = parse_arguments_or_exit(argv, launch.world_size, launch.rank)
    tokenizer = prepare_data_or_exit(config, launch, provide_datasets)
    return pretrain_from_config(config, launch, tokenizer, provide_model, provide_datasets, forward_step)
