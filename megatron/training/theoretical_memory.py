"""How many parameters a model has where, and the memory of training it, in closed form and in Megatron's lines.

Parameters are exact, with the padding of the vocabulary. The activations are those of Korthikanti et al. 2022 (table 2,
https://arxiv.org/abs/2205.05198), for attention that keeps no scores and dropout that keeps no masks; what passes
through a step's kernels beside them is not in the figure.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.models.gpt.chunk_parameters import chunk_parameters
from megatron.core.optimizer.optimizer_config import state_bytes
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.training.activation_estimate import tokens_of_rank
from megatron.training.saved_activations import saved_layer_bytes

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_config import GPTConfig
    from megatron.training.config.run_config import RunConfig

_MEGABYTE = 1024 * 1024
_Kind = tuple[bool, bool]
"""Whether a parameter is an expert's, and whether it is a matrix between the embeddings and the output layer."""


@dataclass(frozen=True)
class ModelSize:
    """Hold numbers of parameters: of the whole model, and of one tensor-parallel rank of each pipeline stage.

    ``kinds`` are those of the shards that have gradients and an optimizer's state, all or low-rank adapters, by
    whether they are replicated over the experts' data-parallel ranks, and whether they are matrices between the
    embeddings and the output layer.
    """

    block: int
    embedding: int
    shards: tuple[int, ...]
    kinds: tuple[Mapping[_Kind, int], ...]

    @property
    def trained(self) -> tuple[int, ...]:
        """Return how many of each stage's shard are trained."""
        return tuple(sum(kinds.values()) for kinds in self.kinds)

    @property
    def experts(self) -> tuple[int, ...]:
        """Return how many of the trained ones are experts'."""
        return tuple(sum(n for (is_expert, _), n in kinds.items() if is_expert) for kinds in self.kinds)


@dataclass(frozen=True)
class TheoreticalMemory:
    """Hold bytes of the most loaded rank; ``activations`` is None where no closed form holds."""

    weights_and_optimizer: float
    activations: float | None


def model_size(config: RunConfig) -> ModelSize:
    """Return how many parameters a configuration's model has, all ranks' copies of one counted once."""
    model, layout = config.model, config.stage_layout
    whole = dataclasses.replace(
        model,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )
    block = StageContents(tuple(range(model.num_layers)), has_embedding=False, has_loss=False)
    # A tied output layer is counted with the embedding that it shares.
    ends = StageContents((), has_embedding=True, has_loss=True)
    num_norm = model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)
    rows = model.padded_vocab_size - whole.padded_vocab_size
    plain = dataclasses.replace(whole, mtp_num_layers=None)
    embedding = _count(plain, ends) - num_norm
    further = _count(whole, ends) - _count(plain, ends)
    embedding += rows * model.hidden_size * (2 if model.untie_embeddings_and_output_weights else 1)
    stages = [layout.chunks(rank) for rank in range(model.pipeline_model_parallel_size)]
    shards = (sum(_count(model, chunk) for chunk in chunks) for chunks in stages)
    kinds = (_count_by_kind(model, chunks) for chunks in stages)
    rest = num_norm + further
    return ModelSize(_count(whole, block) + rest, embedding, tuple(shards), tuple(kinds))


def theoretical_memory(config: RunConfig) -> TheoreticalMemory:
    """Return what weights, gradients, the optimizer's state and activations take on the most loaded rank."""
    size = model_size(config)
    weight, sizes = ELEMENT_BYTES[config.model.params_dtype], config.parallel_sizes
    replicas = {False: sizes.num_replicas, True: sizes.num_expert_replicas}
    weights = max(
        count * weight
        + sum(
            number * _bytes_a_trained_parameter(config, replicas[is_expert], is_matrix=is_matrix)
            for (is_expert, is_matrix), number in kinds.items()
        )
        for count, kinds in zip(size.shards, size.kinds)
    )
    return TheoreticalMemory(weights, _activation_bytes(config))


def describe_theoretical_memory(config: RunConfig) -> list[str]:
    """Return Megatron's lines on the numbers of parameters and on the memory of the most loaded rank."""
    size, memory = model_size(config), theoretical_memory(config)
    *others, most = sorted(size.shards)
    lines = [
        f"Number of parameters in transformer block in billions: {size.block / 1e9: .2f}",
        f"Number of parameters in embedding layers in billions: {size.embedding / 1e9:.2f}",
        f"Total number of parameters in billions: {(size.block + size.embedding) / 1e9:.2f}",
        f"Number of parameters in most loaded shard in billions: {most / 1e9:.4f}",
    ]
    if others:
        lines.append(f"Number of parameters in other shards in billions: {others[-1] / 1e9:.4f}")
    weights = memory.weights_and_optimizer / _MEGABYTE
    line = f"Theoretical memory footprints: weight and optimizer={weights:.2f} MB"
    if memory.activations is not None:
        activations = memory.activations / _MEGABYTE
        line += f", activation={activations:.2f} MB, total={weights + activations:.2f} MB"
    return [*lines, line]


def _count(model: GPTConfig, chunk: StageContents) -> int:
    return sum(parameter.size for parameter in chunk_parameters(model, chunk))


def _count_by_kind(model: GPTConfig, chunks: Iterable[StageContents]) -> Mapping[_Kind, int]:
    found: Counter[_Kind] = Counter()
    for chunk in chunks:
        for each in chunk_parameters(model, chunk):
            found[each.is_expert, each.is_matrix] += each.size * each.is_trained
    return found


def _bytes_a_trained_parameter(config: RunConfig, replicas: int, *, is_matrix: bool = False) -> float:
    """Return the bytes of a gradient, and its share of main parameter and moments, less the weight that is not held."""
    ddp = config.ddp
    gradient: float = ELEMENT_BYTES[ddp.grad_dtype(config.model.params_dtype)]
    state: float = state_bytes(config.optimizer, is_matrix=is_matrix)
    if ddp.shards_over(replicas):
        replicas = ddp.num_shards(replicas)
        state /= replicas
        gradient /= replicas if ddp.shards_gradients else 1
        if ddp.shards_weights:
            # What a weight is short of the whole one, which is counted for every parameter.
            gradient -= ELEMENT_BYTES[config.model.params_dtype] * (1 - 1 / replicas)
    return gradient + state


def _activation_bytes(config: RunConfig) -> float | None:
    """Return the bytes that the first stage keeps for its backward passes.

    None where the tensor-parallel ranks hold copies, the layers recompute all that they keep, tokens choose experts,
    or the layers are others than those of the closed form.
    """
    model, sizes = config.model, config.parallel_sizes
    has_copies = sizes.tp > 1 and not model.sequence_parallel
    is_unplanned = model.num_experts or model.multi_latent_attention or model.num_further_tokens
    if has_copies or model.recompute_granularity != "selective" or is_unplanned:
        return None
    element, h = ELEMENT_BYTES[model.params_dtype], model.hidden_size
    tokens = tokens_of_rank(config)
    chunks = config.stage_layout.chunks(0)
    layers = (number for chunk in chunks for number in chunk.layer_numbers)
    kept = sum(saved_layer_bytes(model, tokens, number, model.recomputed_modules) for number in layers)
    per_microbatch = tokens * element * h / sizes.tp + kept
    num_microbatches = config.training.global_batch_size // (config.training.micro_batch_size * sizes.dp)
    in_flight: float = min(sizes.pp, num_microbatches)
    if len(chunks) > 1:
        # Interleaved chunks warm up further.
        in_flight = sizes.pp * (1 + (sizes.pp - 1) / (sizes.pp * len(chunks)))
    total = per_microbatch * in_flight
    if sizes.pp == 1:
        # The last norm's and the output layer's inputs, and the logits in float32.
        inputs = 1 if model.lora_rank else 2
        total += tokens * (inputs * element * h + 4 * model.padded_vocab_size) / sizes.tp
    return total
