"""Keys and values of earlier layers, and per-layer input embeddings, compared with plain loops over positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.transformer.decoder_config import key_value_sources
from megatron.core.transformer.kv_cache import KeyValueCache
from tests.harness.closeness import relative_difference
from tests.harness.toy_model import SEED, load_global_weights, make_batch, make_model, make_rng

LAYERS, LENGTH, BATCH = 7, 9, 2
SHARING = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
PER_LAYER = {"hidden_size_per_layer_input": 6}
SHAPE: dict[str, Any] = {
    "num_layers": LAYERS,
    "params_dtype": "float64",
    "position_embedding_type": "rope",
    "rotary_base_local": 50,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": True,
    "norm_placement": "sandwich",
    "qk_layernorm": True,
    "geglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "window_size": "3,0",
    "window_attn_skip_freq": "[1,0,1,0,1,1,0]",
}
SOURCES = (None, None, None, None, 2, 2, 3)


def make(**config: Any) -> GPTModel:
    model = make_model(single_rank_group(), **SHAPE, **config)
    load_global_weights(model)
    return model


def rms(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * (1 + weight)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rotated(x: np.ndarray, position: int, base: float) -> np.ndarray:
    half = x.shape[-1] // 2
    result = np.empty_like(x)
    for channel in range(half):
        angle = position / base ** (2 * channel / x.shape[-1])
        first, second = x[..., channel], x[..., half + channel]
        result[..., channel] = first * np.cos(angle) - second * np.sin(angle)
        result[..., half + channel] = second * np.cos(angle) + first * np.sin(angle)
    return result


def oracle(model: GPTModel, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of one sequence, one position at a time, from the definition. Shapes: ``[s] -> [s, v]``."""
    config = model.config
    of = {spec_of(each).name: each.detach().numpy() for each in model.parameters()}
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    each, epsilon = config.hidden_size_per_layer_input, config.norm_epsilon
    keys: dict[int, list[np.ndarray]] = {number: [] for number in range(LAYERS)}
    values: dict[int, list[np.ndarray]] = {number: [] for number in range(LAYERS)}
    logits = []
    for position, token in enumerate(tokens):
        table = of["embedding.word_embeddings.weight"]
        x = table[token]
        if each:
            prefix = "embedding.per_layer."
            per_layer = (of[f"{prefix}projection.weight"] @ x / np.sqrt(config.hidden_size)).reshape(LAYERS, each)
            per_layer = rms(per_layer, of[f"{prefix}norm.weight"], epsilon)
            per_layer = per_layer + of[f"{prefix}word_embeddings.weight"][token].reshape(LAYERS, each) * np.sqrt(each)
            per_layer = per_layer / np.sqrt(2)
        for number in range(LAYERS):
            layer = f"decoder.layers.{number}."
            source = SOURCES[number] if config.num_kv_shared_layers else None
            is_local = number in (0, 2, 4, 5)
            base = 50 if is_local else 10000
            read = rms(x, of[f"{layer}input_layernorm.weight"], epsilon)
            attention = f"{layer}self_attention."
            if source is None:
                fused = of[f"{attention}linear_qkv.weight"].reshape(groups, heads // groups + 2, width, -1) @ read
                query = fused[:, :-2].reshape(heads, width)
                key = rms(fused[:, -2], of[f"{attention}k_layernorm.weight"], epsilon)
                keys[number].append(rotated(key, position, base))
                values[number].append(fused[:, -1])
                source = number
            else:
                query = (of[f"{attention}linear_q.weight"] @ read).reshape(heads, width)
            query = rotated(rms(query, of[f"{attention}q_layernorm.weight"], epsilon), position, base)
            attended = []
            for head in range(heads):
                group = head * groups // heads
                first = max(0, position - 3) if is_local else 0
                scores = np.array([query[head] @ keys[source][p][group] for p in range(first, position + 1)])
                weights = np.exp(scores / np.sqrt(width))
                weights /= weights.sum()
                attended.append(sum(w * values[source][first + p][group] for p, w in enumerate(weights)))
            out = of[f"{attention}linear_proj.weight"] @ np.concatenate(attended)
            x = x + rms(out, of[f"{layer}post_self_attn_layernorm.weight"], epsilon)
            read = rms(x, of[f"{layer}pre_mlp_layernorm.weight"], epsilon)
            gate, up = np.split(of[f"{layer}mlp.linear_fc1.weight"] @ read, 2)
            out = of[f"{layer}mlp.linear_fc2.weight"] @ (gelu(gate) * up)
            x = x + rms(out, of[f"{layer}post_mlp_layernorm.weight"], epsilon)
            if each:
                branch = f"{layer}per_layer_input."
                gated = gelu(of[f"{branch}gate.weight"] @ x) * per_layer[number]
                x = x + rms(of[f"{branch}projection.weight"] @ gated, of[f"{branch}norm.weight"], epsilon)
        logits.append(table @ rms(x, of["decoder.final_layernorm.weight"], epsilon))
    return np.stack(logits)


@pytest.mark.parametrize("parts", [SHARING, PER_LAYER, SHARING | PER_LAYER, {}], ids=["keys", "inputs", "both", "none"])
def test_logits_are_those_of_the_definition(parts: dict[str, Any]) -> None:
    model = make(**parts)
    tokens, _, positions, _ = make_batch(LENGTH, BATCH, model.config.vocab_size)
    with torch.no_grad():
        logits = model(tokens, positions)
    for row in range(BATCH):
        expected = oracle(model, tokens[row].numpy())
        np.testing.assert_allclose(logits[:, row], expected, rtol=1e-11, atol=1e-12)


def test_layers_that_share_have_no_keys_and_wide_feed_forwards() -> None:
    model = make(**SHARING)
    assert model.config.key_value_sources == SOURCES
    assert model.config.shared_key_values == (2, 3)
    for number, source in enumerate(SOURCES):
        layer = model.decoder.layers[str(number)]
        names = {name for name, _ in layer.self_attention.named_parameters()}
        own = {"linear_qkv.weight", "k_layernorm.weight"} if source is None else {"linear_q.weight"}
        assert names == own | {"linear_proj.weight", "q_layernorm.weight"}
        assert layer.mlp.linear_fc2.weight.shape == (28, 36 if source is None else 72)


def test_the_source_is_the_last_layer_of_the_same_kind_with_keys_of_its_own() -> None:
    assert key_value_sources(("a", "b", "a", "b", "a"), 2) == (None, None, None, 1, 2)
    with pytest.raises(ValueError, match="none of the first 2 layers has the window and rotary embedding of layer 3"):
        key_value_sources(("a", "a", "b"), 1)
    with pytest.raises(ValueError, match="all of the 3 layers would share keys and values; use at most 2"):
        key_value_sources(("a",) * 3, 3)


def gradients(model: GPTModel | list[GPTModel]) -> dict[str, torch.Tensor]:
    chunks = model if isinstance(model, list) else [model]
    found = {spec_of(each).name: each.grad for chunk in chunks for each in chunk.parameters()}
    assert all(each is not None for each in found.values())
    return {name: each for name, each in found.items() if each is not None}


def backward(model: GPTModel) -> dict[str, torch.Tensor]:
    tokens, labels, positions, mask = make_batch(LENGTH, BATCH, model.config.vocab_size)
    (model(tokens, positions, labels=labels) * mask).sum().backward()
    return gradients(model)


def assert_equal_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert relative_difference(gradient.numpy(), expected[name].numpy()) < 1e-11, name


def test_gradients_are_those_of_finite_differences() -> None:
    model = make(**SHARING, **PER_LAYER)
    tokens, labels, positions, mask = make_batch(LENGTH, BATCH, model.config.vocab_size)
    found = backward(model)
    directions = np.random.default_rng(5)
    for parameter in model.parameters():
        name, step = spec_of(parameter).name, 1e-5
        if ".layers.1." in name or ".layers.4." in name:
            continue  # Layers of the same kinds as others.
        direction = torch.from_numpy(directions.normal(size=tuple(parameter.shape)))
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * step)
                losses.append((model(tokens, positions, labels=labels) * mask).sum().item())
                parameter.add_(direction, alpha=-sign * step)
        expected = (found[name] * direction).sum().item()
        assert abs((losses[0] - losses[1]) / (2 * step) - expected) < 1e-4 * max(1.0, abs(expected)), name


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
    ],
)
def test_recomputation_gives_the_same_gradients(recompute: dict[str, Any]) -> None:
    expected = backward(make(**SHARING, **PER_LAYER))
    assert_equal_gradients(backward(make(**SHARING, **PER_LAYER, **recompute)), expected)


def chunks_of(config: GPTConfig, *numbers: range) -> list[GPTModel]:
    group = single_rank_group()
    ends = len(numbers) - 1
    chunks = [
        GPTModel(
            *(config, group, make_rng(group)),
            seed=SEED,
            layer_numbers=each,
            pre_process=index == 0,
            post_process=index == ends,
        )
        for index, each in enumerate(numbers)
    ]
    for chunk in chunks:
        load_global_weights(chunk)
    return chunks


@pytest.mark.parametrize("cuts", [(3,), (5,), (2, 6), (1, 4, 6)])
def test_stages_send_shared_tensors_and_their_gradients(cuts: tuple[int, ...]) -> None:
    whole = make(**SHARING, **PER_LAYER, untie_embeddings_and_output_weights=True)
    tokens, labels, positions, mask = make_batch(LENGTH, BATCH, whole.config.vocab_size)
    expected = backward(whole)
    chunks = chunks_of(whole.config, *(range(a, b) for a, b in zip((0, *cuts), (*cuts, LAYERS), strict=True)))
    message: torch.Tensor | None = None
    for chunk in chunks[:-1]:
        message = chunk(tokens, positions, hidden=message)
        assert message.shape == whole.config.message_shape(LENGTH, BATCH)
    loss = chunks[-1](tokens, positions, hidden=message, labels=labels)
    (loss * mask).sum().backward()
    assert_equal_gradients(gradients(chunks), expected)


@pytest.mark.parametrize("cuts", [(), (3,), (5,), (2, 4, 6)])
def test_a_cache_gives_the_logits_of_whole_sequences(cuts: tuple[int, ...]) -> None:
    whole = make(**SHARING, **PER_LAYER, untie_embeddings_and_output_weights=True).eval()
    tokens, _, positions, _ = make_batch(LENGTH, BATCH, whole.config.vocab_size)
    chunks = chunks_of(whole.config, *(range(a, b) for a, b in zip((0, *cuts), (*cuts, LAYERS), strict=True)))
    cache, rows = KeyValueCache(LENGTH), []
    with torch.inference_mode():
        expected = whole(tokens, positions)
        for start, end in ((0, 4), (4, 5), (5, 8), (8, 9)):
            message = None
            for chunk in chunks:
                # All chunks of a rank write to one cache.
                message = chunk.eval()(tokens[:, start:end], positions[:, start:end], hidden=message, cache=cache)
            rows.append(message)
    assert relative_difference(torch.cat(rows).numpy(), expected.numpy()) < 1e-12
