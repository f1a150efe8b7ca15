"""DeepSeek sparse attention: selection, output, loss and gradients are those of a slow definition in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.ops import CAUSAL, AttentionPattern, index_scores, select_keys, sparse_attention
from megatron.core.ops.attention_pattern import SelectedKeys
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.sparse_attention import SparseLatentAttention
from tests.harness.toy_model import load_global_weights, make_batch, make_model

LENGTH, BATCH, TOPK, HEADS, ROTARY, COEFF = 9, 2, 3, 4, 4, 0.7
MODEL: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": ROTARY,
    "v_head_dim": 7,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "dsa_indexer_n_heads": 5,
    "dsa_indexer_head_dim": 9,
    "dsa_indexer_topk": TOPK,
    "dsa_indexer_loss_coeff": COEFF,
    "params_dtype": "float64",
}


def make_layer(**config: Any) -> SparseLatentAttention:
    model = make_model(single_rank_group(), **MODEL | config)
    load_global_weights(model)
    layer = model.decoder.layers["0"].self_attention
    assert isinstance(layer, SparseLatentAttention)
    return layer


def rotated(vector: torch.Tensor, position: int) -> torch.Tensor:
    """Rotate the pairs of adjacent channels of one vector by angles that grow with the position."""
    frequencies = 10000.0 ** (-torch.arange(0, ROTARY, 2, dtype=torch.float64) / ROTARY)
    cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
    real, imaginary = vector[0::2], vector[1::2]
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=1).flatten()


def normalized(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return vector / (vector.square().mean() + 1e-5).sqrt() * weight


def weights_of(query: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
    """Return the attention weights of one query of one head."""
    return torch.stack([query @ key / math.sqrt(6 + ROTARY) for key in keys]).softmax(dim=0)


def defined(
    layer: SparseLatentAttention, x: torch.Tensor, sees: torch.Tensor, compares_selected: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, selected keys ``[b, s, s]`` and loss, one query, head and key after another."""
    weights = dict(layer.named_parameters())
    index = {name.removeprefix("core_attention.indexer."): w for name, w in weights.items() if "indexer" in name}
    plain, value_width = 6, 7
    output, losses = torch.zeros(LENGTH, BATCH, 28, dtype=torch.float64), []
    selected = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    for sequence in range(BATCH):
        inputs = x[:, sequence]
        of_query = [normalized(weights["linear_q_down_proj.weight"] @ v, weights["q_layernorm.weight"]) for v in inputs]
        narrow = [weights["linear_kv_down_proj.weight"] @ v for v in inputs]
        up = [
            (weights["linear_kv_up_proj.weight"] @ normalized(v[:10], weights["kv_layernorm.weight"])).view(HEADS, -1)
            for v in narrow
        ]
        of_keys = [rotated(v[10:], position) for position, v in enumerate(narrow)]
        index_keys = []
        for position, v in enumerate(inputs.detach()):
            mapped = index["linear_wk.weight"] @ v
            centered = mapped - mapped.mean()
            key = centered / (centered.square().mean() + 1e-5).sqrt() * index["k_norm.weight"] + index["k_norm.bias"]
            index_keys.append(torch.cat((key[:5], rotated(key[5:], position))))
        for position in range(LENGTH):
            query = (weights["linear_q_up_proj.weight"] @ of_query[position]).view(HEADS, -1)
            query = torch.stack([torch.cat((q[:plain], rotated(q[plain:], position))) for q in query])
            asked = (index["linear_wq_b.weight"] @ of_query[position].detach()).view(5, 9)
            factors = index["linear_weights_proj.weight"] @ inputs[position].detach()
            visible = [key for key in range(LENGTH) if sees[sequence, position, key]]
            scores = {}
            for key in visible:
                score = torch.zeros((), dtype=torch.float64)
                for head in range(5):
                    turned = torch.cat((asked[head, :5], rotated(asked[head, 5:], position)))
                    score = score + factors[head] * (turned @ index_keys[key]).clamp(min=0) / math.sqrt(5 * 9)
                scores[key] = score
            chosen = sorted(sorted(visible, key=lambda key: scores[key].item(), reverse=True)[:TOPK])
            selected[sequence, position, chosen] = True

            keys = [torch.cat((up[key][:, :plain], of_keys[key].expand(HEADS, -1)), dim=1) for key in range(LENGTH)]
            heads = []
            for head in range(HEADS):
                values = torch.stack([up[key][head, plain:] for key in chosen])
                heads.append(weights_of(query[head], [keys[key][head] for key in chosen]) @ values)
            assert heads[0].shape == (value_width,)
            output[position, sequence] = weights["linear_proj.weight"] @ torch.cat(heads)
            compared = chosen if compares_selected else visible
            of_heads = [weights_of(query[head], [keys[key][head] for key in compared]) for head in range(HEADS)]
            target = torch.stack(of_heads).mean(dim=0).detach()
            predicted = torch.stack([scores[key] for key in compared]).softmax(dim=0)
            losses.append((target * ((target + 1e-10).log() - (predicted + 1e-10).log())).sum())
    return output, selected, torch.stack(losses).sum() * COEFF


def gradients_of(layer: SparseLatentAttention, x: torch.Tensor, total: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(total, [x, *parameters.values()])
    return dict(zip(("x", *parameters), found, strict=True))


def inputs_of(layer: SparseLatentAttention, pattern: AttentionPattern) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(LENGTH, BATCH, 28, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = RotaryEmbedding(ROTARY, 10000.0, interleaved=True).angles(torch.arange(LENGTH)[None], torch.float64)
    holder = SelectedKeys()
    return x, replace(pattern, selected=holder), angles, holder


DOCUMENTS = torch.tensor([[0] * 2 + [1] * 7, [0] * 5 + [1] * 4])


@pytest.mark.parametrize(
    ("compares_selected", "has_documents", "most_elements"),
    [(False, False, 1 << 24), (True, False, 2 * BATCH * LENGTH**2), (False, True, 1)],
)
def test_a_layer_computes_the_definition(
    compares_selected: bool, has_documents: bool, most_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "_BLOCK_ELEMENTS", most_elements)
    layer = make_layer(dsa_indexer_use_sparse_loss=compares_selected)
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    pattern = CAUSAL
    if has_documents:
        pattern = AttentionPattern(document_ids=DOCUMENTS)
        sees = sees & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :])
    x, pattern, angles, holder = inputs_of(layer, pattern)
    found, (loss,) = layer(x, pattern, angles)
    output, selected, loss_sum = defined(layer, x, sees, compares_selected)
    assert holder.mask is not None
    assert torch.equal(holder.mask[:, 0], selected)
    assert selected.sum(dim=-1).max() == TOPK < LENGTH
    torch.testing.assert_close(found, output, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(loss.loss_sum, loss_sum, rtol=1e-10, atol=0)
    assert (loss.name, float(loss.num_tokens), loss.coefficient) == ("indexer loss", LENGTH * BATCH, 1.0)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ours = gradients_of(layer, x, (found * factors).sum() + loss.loss_sum)
    theirs = gradients_of(layer, x, (output * factors).sum() + loss_sum)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-11, msg=name)
    # The loss of the indexer reaches its own weights alone, and no other loss reaches them.
    alone = torch.autograd.grad(layer(x, pattern, angles).losses[0].loss_sum, layer.parameters(), allow_unused=True)
    reached = {name for (name, _), grad in zip(layer.named_parameters(), alone, strict=True) if grad is not None}
    assert reached == {name for name, _ in layer.named_parameters() if ".indexer." in name}


def test_gradients_of_index_scores_are_those_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "_BLOCK_ELEMENTS", 2 * 2 * 5 * 7)
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 2, 3, 4), (7, 2, 4), (5, 2, 3))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(index_scores, inputs)
    query, key, weights = (each.detach() for each in inputs)
    expected = torch.einsum("sbnt,sbn->bst", torch.einsum("sbnd,tbd->sbnt", query, key).relu(), weights)
    torch.testing.assert_close(index_scores(query, key, weights), expected)


def test_every_visible_key_is_selected_if_there_are_few() -> None:
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None]
    scores = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(2))
    assert torch.equal(select_keys(scores, visible, 6), visible.expand(2, -1, -1))
    chosen = select_keys(scores, visible, 3)
    assert chosen.sum(dim=-1).tolist() == [[1, 2, 3, 3, 3, 3]] * 2
    least = scores.masked_fill(~chosen, torch.inf).amin(dim=-1)
    assert (scores.masked_fill(chosen | ~visible, -torch.inf).amax(dim=-1) < least).all()


def test_few_keys_and_no_loss_need_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose sequences have at most top-k positions computes plain MLA."""
    layer = make_layer(dsa_indexer_topk=LENGTH, dsa_indexer_loss_coeff=0.0)
    plain = make_model(single_rank_group(), **MODEL | {"experimental_attention_variant": None})
    load_global_weights(plain)
    x, pattern, angles, holder = inputs_of(layer, CAUSAL)
    monkeypatch.delattr("megatron.core.transformer.sparse_attention.index_scores")
    found, losses = layer(x, pattern, angles)
    assert (losses, holder.mask, holder.is_known) == ((), None, True)
    assert torch.equal(found, plain.decoder.layers["0"].self_attention(x, CAUSAL, angles).hidden)


@pytest.mark.parametrize("full", [False, True])
def test_layers_without_an_indexer_attend_to_the_keys_of_the_last(full: bool) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    shape = {"num_layers": 5, "dsa_indexer_layer_freq": "[1,0,0,1,0]", **(recompute if full else {})}
    model = make_model(single_rank_group(), **MODEL | shape)
    load_global_weights(model)
    masks: list[torch.Tensor] = []
    for number in range(5):
        attention = model.decoder.layers[str(number)].self_attention
        assert hasattr(attention.core_attention, "indexer") == (number in (0, 3))
        attention.logit_observers.append(lambda layer, query, key, pattern: masks.append(pattern.mask))
    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    losses: list[Any] = []
    loss = model(tokens, positions, labels=labels, losses=losses).sum()
    first, second = masks[0], masks[3]
    assert all(torch.equal(mask, first if number < 3 else second) for number, mask in enumerate(masks))
    assert not torch.equal(first, second)
    assert len(losses) == 2
    (loss + sum(each.loss_sum for each in losses)).backward()
    if full:
        # The backward pass recomputes layers from the last on, each with the keys that it attended to.
        again = masks[5:]
        assert len(again) == 5
        assert all(torch.equal(mask, second if number < 2 else first) for number, mask in enumerate(again))


def test_the_cache_keeps_the_keys_of_the_indexer_with_the_rotary_parts() -> None:
    layer = make_layer(dsa_indexer_loss_coeff=None).eval()
    x, pattern, angles, holder = inputs_of(layer, CAUSAL)
    whole = layer(x, pattern, angles).hidden
    selected, cache, rows = holder.mask, KeyValueCache(LENGTH), []
    assert selected is not None
    for start, end in ((0, 5), (5, 6), (6, 9)):
        part = replace(angles, cos=angles.cos[start:end], sin=angles.sin[start:end])
        rows.append(layer(x[start:end], pattern, part, cache).hidden)
        assert holder.mask is not None
        assert torch.equal(holder.mask, selected[:, :, start:end, :end])
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-11, atol=1e-12)
    assert [tuple(kept.shape) for kept in cache._buffers[0]] == [(9, 2, 1, 10), (9, 2, 1, ROTARY + 9)]
