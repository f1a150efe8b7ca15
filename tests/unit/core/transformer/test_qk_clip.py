"""QK-clip: the logits of clipped heads after an update, and the rows of weights and shards that are scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config_base import from_fields
from megatron.core.distributed.flat_parameters import ParamShard
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.optimizer.update_bucket import OptimizedShard
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.initialization import initialize_module
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.gated_attention import GatedAttention
from megatron.core.transformer.multi_latent_attention import LatentAttention
from megatron.core.transformer.qk_clip import QueryKeyClip
from megatron.core.transformer.rotary_pos_embedding import RotaryEmbedding

LENGTH, BATCH, HEADS, WIDTH = 12, 2, 4, 6
WORLD = single_rank_group(("world",))
KINDS: dict[str, tuple[type[SelfAttention], dict[str, Any]]] = {
    "grouped": (SelfAttention, {}),
    "biases": (SelfAttention, {"add_qkv_bias": True}),
    "all-heads": (SelfAttention, {"num_query_groups": HEADS}),
    "gated": (GatedAttention, {"attention_output_gate": True}),
    "latent": (
        LatentAttention,
        {
            "multi_latent_attention": True,
            "num_query_groups": HEADS,
            "qk_head_dim": 6,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 5,
            "kv_lora_rank": 7,
            "q_lora_rank": 9,
            "qk_layernorm": True,
        },
    ),
}
Seen = list[tuple[torch.Tensor, torch.Tensor]]


def make(kind: str, **changes: Any) -> tuple[SelfAttention, GPTConfig, Seen]:
    """Return a layer with large logits, and the list of the queries and keys of its calls."""
    cls, fields = KINDS[kind]
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": HEADS, "num_query_groups": 2}
    sizes |= {"kv_channels": WIDTH, "normalization": "RMSNorm", "add_bias_linear": False, "params_dtype": "float64"}
    sizes |= {"init_method_std": 0.4, "position_embedding_type": "rope", "qk_clip": True, "attention_dropout": 0.0}
    config = from_fields(GPTConfig, **(sizes | fields | changes))
    layer = cls(config, 0, single_rank_group(), "cpu")
    initialize_module(layer, 3)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    seen: Seen = []
    layer.logit_observers.append(lambda _, query, key, pattern: seen.append((query, key)))
    return layer.train(), config, seen


def run(layer: SelfAttention, config: GPTConfig, pattern: AttentionPattern = CAUSAL) -> None:
    x = torch.randn(LENGTH, BATCH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    width = config.mla.qk_pos_emb_head_dim if config.mla.multi_latent_attention else WIDTH
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    layer(x, pattern, RotaryEmbedding(width, 10000).angles(positions, torch.float64))


def logits_of(query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern = CAUSAL) -> torch.Tensor:
    """Return all logits, with those that are not attended to at minus infinity. Shapes: ``-> [b, n, s, s]``."""
    every_key = key.repeat_interleave(HEADS // key.shape[2], dim=2)
    logits = torch.einsum("qbnd,kbnd->bnqk", query, every_key) / query.shape[-1] ** 0.5
    visible = pattern.matrix(LENGTH, LENGTH, torch.device("cpu"))
    assert visible is not None
    return logits.masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_heads_above_the_threshold_come_down_to_it_and_others_stay(kind: str, alpha: float) -> None:
    layer, config, seen = make(kind)
    run(layer, config)
    before = logits_of(*seen[0])
    groups = before.amax(dim=(0, 2, 3)).view(layer.num_groups, -1).amax(dim=1)
    threshold = float(groups.sort().values[-2:].mean())
    layer, config, seen = make(kind, qk_clip_threshold=threshold, qk_clip_alpha=alpha)
    clip = QueryKeyClip([layer], config, WORLD, "cpu")
    clip.begin_step()
    run(layer, config)
    values = {id(parameter): name for name, parameter in layer.named_parameters()}
    scaled = {values[id(parameter)] for parameter, factors in clip.row_factors() if bool((factors != 1).any())}
    for parameter, factors in clip.row_factors():
        parameter.mul_(factors.view(-1, *(1,) * (parameter.dim() - 1)))
    run(layer, config)
    after = logits_of(*seen[-1])
    eta = (threshold / groups).clamp(max=1.0)
    assert sorted(eta < 1) == [False] * (len(eta) - 1) + [True]
    expected = before * eta.repeat_interleave(HEADS // len(eta))[None, :, None, None]
    torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-10)
    assert float(after.max()) == pytest.approx(threshold)
    weights = {"linear_q_up_proj.weight", "linear_kv_up_proj.weight"} if kind == "latent" else {"linear_qkv.weight"}
    assert scaled == weights | ({"linear_qkv.bias"} if kind == "biases" else set())


@torch.no_grad()
def test_queries_and_keys_share_the_factor_by_alpha_and_values_keep_their_weights() -> None:
    layer, config, _ = make("grouped", qk_clip_threshold=0.5, qk_clip_alpha=0.25)
    clip = QueryKeyClip([layer], config, WORLD, "cpu")
    clip._largest[0] = torch.tensor([8.0, 0.25])
    ((weight, factors),) = clip.row_factors()
    assert weight is layer.linear_qkv.weight
    eta = 0.5 / 8.0
    first = [eta**0.25] * 2 * WIDTH + [eta**0.75] * WIDTH + [1.0] * WIDTH
    torch.testing.assert_close(factors, torch.tensor(first + [1.0] * 4 * WIDTH, dtype=torch.float64))


@torch.no_grad()
def test_the_rotary_part_of_latent_queries_has_the_whole_factor() -> None:
    """All heads share the rotary part of the keys, whose weights stay."""
    layer, config, _ = make("latent", qk_clip_threshold=0.5, qk_clip_alpha=0.25)
    clip = QueryKeyClip([layer], config, WORLD, "cpu")
    clip._largest[0] = torch.tensor([8.0, 0.25, 0.5, 2.0])
    eta = torch.tensor([1 / 16, 1.0, 1.0, 1 / 4], dtype=torch.float64)
    factors = {id(weight): rows for weight, rows in clip.row_factors()}
    of_query = torch.stack([torch.cat(((each**0.25).expand(6), each.expand(4))) for each in eta])
    of_key = torch.stack([torch.cat(((each**0.75).expand(6), torch.ones(5, dtype=torch.float64))) for each in eta])
    assert isinstance(layer, LatentAttention)
    expected = {layer.linear_q_up_proj.weight: of_query, layer.linear_kv_up_proj.weight: of_key}
    assert factors.keys() == {id(weight) for weight in expected}
    for weight, rows in expected.items():
        torch.testing.assert_close(factors[id(weight)], rows.flatten())
    assert clip.largest() == 8.0


@torch.no_grad()
def test_the_logits_of_all_micro_batches_of_a_step_count_within_documents() -> None:
    layer, config, seen = make("grouped", qk_clip_threshold=1e9)
    clip = QueryKeyClip([layer], config, WORLD, "cpu")
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    ids[:, 5:] = 1
    pattern = AttentionPattern(document_ids=ids)
    run(layer, config)
    clip.begin_step()
    run(layer, config, pattern)
    expected = logits_of(*seen[-1], pattern)
    layer.linear_qkv.weight.mul_(0.9)
    run(layer, config, pattern)
    layer.eval()
    layer.linear_qkv.weight.mul_(9.0)
    run(layer, config, pattern)
    torch.testing.assert_close(clip._largest[0], expected.amax(dim=(0, 2, 3)).view(2, -1).amax(dim=1))


@pytest.mark.parametrize(("start", "end"), [(0, 40), (3, 37), (6, 9), (9, 20), (39, 40)])
def test_a_shard_scales_its_part_of_rows(start: int, end: int) -> None:
    """The main parameter is scaled in float32 and rounded into the model."""
    weight = torch.nn.Parameter(torch.randn(8, 5).bfloat16())
    main = torch.randn(8, 5)
    factors = torch.linspace(0.1, 1.0, 8, dtype=torch.float64)
    values = weight.detach().clone().view(-1)
    expected = (main * factors.float()[:, None]).view(-1)[start:end]
    part = main.view(-1)[start:end].clone()
    shard = ParamShard(weight, start, end, values[start:end], torch.zeros(end - start))
    OptimizedShard(shard, part).scale_rows(factors)
    torch.testing.assert_close(part, expected)
    assert torch.equal(values[start:end], expected.bfloat16())
    assert torch.equal(values[end:], weight.detach().view(-1)[end:])
