"""Layers in fp8, experts, latent attention and further tokens, against float64 products of the same operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config_base import from_fields
from megatron.core.distributed.flat_parameters import is_sent_in_float8
from megatron.core.main_grad import MainGrad, attach_main_grad, main_grad_of
from megatron.core.models import fp8_layers
from megatron.core.models.fp8_layers import compute_in_float8, describe_float8
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.fp8_quantizers import OPERANDS, Float8Recipe, Float8State, Fp8Quantizers
from megatron.core.ops.fp8_tensor import SEGMENTS_OF_128, Quantized
from megatron.core.parallel_config import Fp8Config, Fp8TensorIndex
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.moe import grouped_experts as experts_module
from megatron.core.transformer.moe.grouped_experts import float8_grouped_linear, grouped_linear
from tests.harness.float8_products import assert_products
from tests.harness.toy_model import load_global_weights, make_batch, make_float8_model, make_model

NARROW = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
SHAPE: dict[str, Any] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 48,
    "kv_lora_rank": 160,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "hidden_size": 144,
    "num_query_groups": 4,
    "ffn_hidden_size": 32,
    "add_bias_linear": False,
}
LENGTH, BATCH = 24, 2


def make(recipe: str, **config: Any) -> GPTModel:
    return make_float8_model(recipe, **(SHAPE | config))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_all_products_are_those_of_quantized_operands(recipe: str) -> None:
    attention = make(recipe, num_layers=1).decoder.layers["0"].self_attention
    generator = torch.Generator().manual_seed(5)
    for name in NARROW:
        assert_products(getattr(attention, name), LENGTH, BATCH, generator, f"{name}, {recipe}")


@pytest.mark.parametrize(("q_lora_rank", "num_linear"), [(48, 7), (None, 6)])
def test_delayed_scaling_has_a_place_for_each_map(q_lora_rank: int | None, num_linear: int) -> None:
    model = make("delayed", q_lora_rank=q_lora_rank)
    places = model.config.float8_places
    assert (places.num_layers, places.num_places) == (2, num_linear)
    found = [module.quantizers._place for module in model.modules() if getattr(module, "quantizers", None)]
    assert sorted(found) == [(layer, place) for layer in range(2) for place in range(num_linear)]


RECURRENT: dict[str, Any] = {
    "hybrid_override_pattern": "MG*-KP",
    "num_layers": 6,
    "hidden_size": 48,
    "ffn_hidden_size": 64,
    "mamba_state_dim": 16,
    "mamba_head_dim": 6,
    "mamba_num_groups": 4,
    "mamba_num_heads": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "add_bias_linear": False,
}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("has_biases", [False, True])
def test_all_products_of_recurrent_layers_are_those_of_quantized_operands(recipe: str, has_biases: bool) -> None:
    shape = RECURRENT | {"mamba_proj_bias": has_biases}
    model, generator = make_float8_model(recipe, **shape), torch.Generator().manual_seed(5)
    of_kda = ("in_proj", "out_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
    for number, names in {"0": of_kda[:2], "1": of_kda[:2], "4": of_kda, "5": of_kda[:2]}.items():
        layer = model.decoder.layers[number]
        mixer = getattr(layer, layer.name_of_branch)
        mixer = mixer.mamba if number == "5" else mixer
        for bias in (mixer.in_proj.bias, mixer.out_proj.bias):
            assert (bias is not None) == (has_biases and number in "05")
            if bias is not None:
                torch.nn.init.normal_(bias, generator=generator)
        for name in names:
            assert_products(getattr(mixer, name), LENGTH, BATCH, generator, f"{number} {name}, {recipe}")
    found = [module.quantizers._place for module in model.modules() if getattr(module, "quantizers", None)]
    counts = {0: 2, 1: 2, 2: 2, 3: 2, 4: 6, 5: 4}
    assert sorted(found) == [(layer, place) for layer, count in counts.items() for place in range(count)]
    assert model.config.float8_places.num_places == 8


def test_inputs_that_a_norm_of_the_stream_gives_are_known_as_such() -> None:
    """What `--recompute-modules layernorm` computes again is not kept in fp8; narrow vectors are."""
    again: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
    kda = make_float8_model("delayed", **RECURRENT, **again).decoder.layers["4"].self_attention
    assert {
        name
        for name, module in kda.named_children()
        if getattr(getattr(module, "quantizers", None), "input_is_recomputed", False)
    } == {"in_proj", "f_a_proj", "g_a_proj"}
    model = make("delayed", **again)
    attention = model.decoder.layers["0"].self_attention
    found = {name for name in NARROW if getattr(attention, name).quantizers.input_is_recomputed}
    assert found == {"linear_q_down_proj", "linear_kv_down_proj"}


FURTHER_SHAPE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "mtp_num_layers": 2,
    "num_layers": 3,
    "hidden_size": 144,
    "ffn_hidden_size": 32,
    "add_bias_linear": False,
}


def make_further(recipe: str, **config: Any) -> GPTModel:
    return make_float8_model(recipe, **(FURTHER_SHAPE | config))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_all_products_are_those_of_quantized_operands_of_further_tokens(recipe: str) -> None:
    further = make_further(recipe).mtp.layers["1"]
    layer, generator = further.transformer_layer, torch.Generator().manual_seed(5)
    attention, mlp = layer.self_attention, layer.mlp
    modules = further.eh_proj, attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2
    for number, module in enumerate(modules):
        assert_products(module, LENGTH, BATCH, generator, f"{number}, {recipe}")


def test_each_product_has_a_place_of_its_own_behind_the_layers() -> None:
    model = make_further("delayed")
    places = model.config.float8_places
    assert (places.num_layers, places.num_places, places.join) == (5, 5, 4)
    found = [module.quantizers._place for module in model.modules() if getattr(module, "quantizers", None)]
    expected = [(layer, place) for layer in range(5) for place in range(4)] + [(3, 4), (4, 4)]
    assert sorted(found) == sorted(expected)


def test_they_are_in_fp8_where_the_last_layers_are_not() -> None:
    """As in Megatron, which applies --first-last-layers-bf16 to the model's own layers alone."""
    model = make_further("delayed", first_last_layers_bf16=True)
    found = {module.quantizers._place[0] for module in model.modules() if getattr(module, "quantizers", None)}
    assert found == {1, 3, 4}
    line = describe_float8(model.config, "cpu")
    assert line is not None
    assert "layers 2 to 2 of 3, and the layers of MTP modules" in line


@pytest.mark.parametrize(
    ("device", "has_products", "by"),
    [
        ("cpu", True, "float32 GEMMs of the quantized operands"),
        ("cuda", False, "float32 GEMMs of the quantized operands"),
        ("cuda", True, "torch's FP8 GEMMs"),
    ],
)
def test_the_line_says_what_computes_the_products(
    monkeypatch: pytest.MonkeyPatch, device: str, has_products: bool, by: str
) -> None:
    monkeypatch.setattr(fp8_layers, "has_scaled_products", lambda *given: has_products)
    config = from_fields(DecoderConfig, num_layers=4, hidden_size=32, num_attention_heads=4, fp8_format="hybrid")
    line = describe_float8(config, device)
    assert line is not None
    assert line.startswith("fp8: hybrid, ")
    assert f"layers 1 to 4 of 4; computed by {by}" in line
    assert "MTP modules" not in line
    assert describe_float8(DecoderConfig(num_layers=4, hidden_size=32, num_attention_heads=4), device) is None


def test_weights_are_gathered_in_fp8_where_their_products_are() -> None:
    model = make_model(single_rank_group(), bf16=True, fp8_format="hybrid", fp8_param_gather=True, **FURTHER_SHAPE)
    compute_in_float8([model], model.config, "cpu")
    sent = {name for name, parameter in model.named_parameters() if is_sent_in_float8(parameter)}
    linear = [name for name, _ in model.named_parameters() if "linear" in name or "eh_proj" in name]
    assert sent == {name for name in linear if name.endswith("weight")}
    assert "mtp.layers.1.eh_proj.weight" in sent


COUNTS, INNER, OUTER = (5, 0, 33, 16), 160, 48
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
PLACES = Fp8TensorIndex(1, num_linear=3, num_experts=len(COUNTS))
WORLD = single_rank_group(("world",))


def quantizers_of(recipe: str, state: Float8State | None = None, **settings: bool) -> tuple[Fp8Quantizers, ...]:
    """Return those of each expert's second product."""
    recipe_of = Float8Recipe.of(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe, **settings))
    return tuple(Fp8Quantizers(recipe_of, state, (0, PLACES.of_expert(number, 1))) for number in range(len(COUNTS)))


def remembering(*steps: float) -> Float8State:
    """Return the state of delayed scaling behind steps whose operands were so many times as large as now.

    The second expert was given no tokens in any of them.
    """
    state = Float8State(Fp8Config(fp8_format="hybrid"), PLACES, "cpu")
    for iteration, factor in enumerate(steps):
        x, weight, _, grad = operands()
        parts = [each.detach().split_with_sizes(COUNTS) for each in (x, grad)]
        for number, count in enumerate(COUNTS):
            if count:
                seen = parts[0][number], weight.detach()[number], parts[1][number]
                amax = torch.stack([factor * each.abs().amax().float() for each in seen])
                state.amax[0, PLACES.of_expert(number, 1)] = amax
        state.update(WORLD, iteration)
    return state


def operands() -> tuple[torch.Tensor, torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(COUNTS), INNER, generator=generator).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(len(COUNTS), OUTER, INNER, generator=generator).bfloat16())
    bias = torch.nn.Parameter(torch.randn(len(COUNTS), OUTER, generator=generator).bfloat16())
    return x, weight, bias, torch.randn(sum(COUNTS), OUTER, generator=generator).bfloat16()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, rounded: bool = True) -> None:
    """Assert equality up to the rounding of the result to bfloat16, or of sums in float32."""
    tolerance = 2**-8 if rounded else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_each_experts_quantized_operands(recipe: str) -> None:
    # Scales of steps in which all was an eighth cut off what is larger; those of their own step do not.
    state = remembering(0.125) if recipe == "delayed" else None
    quantizers = quantizers_of(recipe, state)
    x, weight, bias, grad = operands()
    main_grad = MainGrad(torch.full((len(COUNTS), OUTER, INNER), torch.nan))
    attach_main_grad(weight, main_grad)
    output = float8_grouped_linear(x, weight, bias, COUNTS, quantizers, adds_bias=True, library="auto")
    output.backward(grad)
    assert x.grad is not None
    assert bias.grad is not None
    start = 0
    for number, count in enumerate(COUNTS):
        rows, of_output = x.detach()[start : start + count], grad[start : start + count]
        if not count:
            assert not main_grad.tensor[number].any()
            continue
        own = quantizers[number]
        # What is missing to a whole number of blocks is zero, and has no part in any scale but its own.
        missing = (0, 0, 0, -count % 16)
        rows, of_output = F.pad(rows, missing), F.pad(of_output, missing)

        def values(operand: str, matrix: torch.Tensor, own: Fp8Quantizers) -> tuple[torch.Tensor, torch.Tensor]:
            plain, turned = own.matrix(operand, matrix, transpose=True, records=False)
            assert turned is not None
            return plain.values(torch.float64), turned.values(torch.float64)

        (left, left_turned), (back, back_turned) = values("input", rows, own), values("grad", of_output, own)
        plain, turned = (
            own.weight(weight.detach()[number], transpose=flag, records=False, scale=None).values(torch.float64)
            for flag in (False, True)
        )
        product = (left @ plain.t())[:count].bfloat16() + bias.detach()[number]
        assert_near(output.detach()[start : start + count], product.double())
        assert_near(x.grad[start : start + count], (back @ turned.t())[:count])
        assert_near(main_grad.tensor[number], back_turned @ left_turned.t(), rounded=False)
        assert_near(bias.grad[number], of_output.double().sum(dim=0))
        start += count


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_whole_blocks_of_rows_change_no_number_but_the_order_of_sums(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """A device's products take whole blocks: there, rows of zeros fill them."""
    gradients, num_rows = [], []
    product = experts_module.scaled_product

    def counted(left: Quantized, right: Quantized, *rest: torch.dtype, library: str) -> torch.Tensor:
        num_rows.append(len(left.data))
        return product(left, right, *rest, library=library)

    monkeypatch.setattr(experts_module, "scaled_product", counted)
    for multiple in (16, 128):
        monkeypatch.setattr(experts_module, "_summed_multiple", lambda *of, found=multiple: found)
        x, weight, _, grad = operands()
        main_grad = MainGrad(torch.empty(len(COUNTS), OUTER, INNER))
        attach_main_grad(weight, main_grad)
        quantizers = quantizers_of(recipe)
        output = float8_grouped_linear(x, weight, None, COUNTS, quantizers, adds_bias=True, library="auto")
        output.backward(grad)
        assert x.grad is not None
        gradients.append((output.detach(), x.grad, main_grad.tensor))
    # Outputs and input gradients of 5, 33 and 16 rows; weight gradients have rows of the weight.
    assert num_rows == 2 * (2 * [16, 48, 16] + 3 * [OUTER])
    for few, many in zip(*gradients):
        assert_near(many, few.double(), rounded=few.dtype is torch.bfloat16)


@pytest.mark.parametrize(("has_products", "multiple"), [(True, 128), (False, 16)])
def test_whole_blocks_are_filled_only_for_a_device_that_takes_them(
    monkeypatch: pytest.MonkeyPatch, has_products: bool, multiple: int
) -> None:
    monkeypatch.setattr(experts_module, "has_scaled_products", lambda *blocks_and_device: has_products)
    found = [experts_module._summed_multiple(SEGMENTS_OF_128, device) for device in ("cpu", "cuda")]
    assert found == [16, multiple]


def test_each_experts_amaxes_are_noted_beside_none_of_one_without_tokens() -> None:
    state = remembering(1.0)
    x, weight, _, grad = operands()
    float8_grouped_linear(
        x, weight, None, COUNTS, quantizers_of("delayed", state), adds_bias=True, library="auto"
    ).backward(grad)
    noted = state.amax[0, PLACES.num_linear :].view(len(COUNTS), 2, len(OPERANDS))
    assert not noted[:, 0].any()
    parts = x.detach().split_with_sizes(COUNTS), weight.detach(), grad.split_with_sizes(COUNTS)
    for number, count in enumerate(COUNTS):
        amaxes = [each[number].abs().amax().item() if count else 0.0 for each in parts]
        assert noted[number, 1].tolist() == amaxes


def test_what_is_evaluated_is_not_noted() -> None:
    state = remembering(1.0)
    x, weight, _, _ = operands()
    with torch.no_grad():
        float8_grouped_linear(x, weight, None, COUNTS, quantizers_of("delayed", state), adds_bias=True, library="auto")
    assert not state.amax.any()


def test_an_expert_that_was_never_given_tokens_is_scaled_as_the_layers_others() -> None:
    """Its history is of zeros, of which no scale can be made: at 1 its small gradients would vanish."""
    state = remembering(2.0**-20)
    assert not state.history[0, PLACES.of_expert(1, 1)].any()
    assert not state.expected[0, PLACES.of_expert(1, 1)].any()
    scales = state.scale[0, PLACES.num_linear :].view(len(COUNTS), 2, len(OPERANDS))
    assert torch.equal(scales[1, 1], scales[:, 1].amax(0))
    assert torch.equal(scales[:, 0], torch.ones(len(COUNTS), len(OPERANDS)))
    counts = (0, sum(COUNTS), 0, 0)
    x, weight, grad = (each.detach() * 2.0**-20 for each in operands() if each.dim() == 3 or len(each) == sum(COUNTS))
    x.requires_grad_()
    quantizers = quantizers_of("delayed", state)
    float8_grouped_linear(x, weight, None, counts, quantizers, adds_bias=True, library="auto").backward(grad)
    assert x.grad is not None
    exact = grad.double() @ weight[1].double()
    assert (x.grad.double() - exact).norm() < 0.1 * exact.norm()


def test_an_expert_that_is_left_out_for_long_keeps_its_scale() -> None:
    state = remembering(1.0)
    scale = state.scale.clone()
    for iteration in range(3):
        state.update(WORLD, iteration)
    assert not state.history.any()
    assert torch.equal(state.scale, scale)


def test_weight_gradients_may_stay_out_of_fp8() -> None:
    gradients = []
    for quantizers in (None, quantizers_of("tensorwise", fp8_wgrad=False)):
        x, weight, _, grad = operands()
        if quantizers is None:
            grouped_linear(x, weight, None, COUNTS).backward(grad)
        else:
            float8_grouped_linear(x, weight, None, COUNTS, quantizers, adds_bias=True, library="auto").backward(grad)
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def test_weight_gradients_out_of_fp8_are_added_to_main_gradients() -> None:
    found = []
    for quantizers in (None, quantizers_of("tensorwise", fp8_wgrad=False)):
        x, weight, _, grad = operands()
        attach_main_grad(weight, MainGrad(torch.zeros_like(weight, dtype=torch.float32)))
        for _ in range(2):
            if quantizers is None:
                output = grouped_linear(x, weight, None, COUNTS)
            else:
                output = float8_grouped_linear(x, weight, None, COUNTS, quantizers, adds_bias=True, library="auto")
            output.backward(grad)
        main_grad = main_grad_of(weight)
        assert main_grad is not None
        found.append(main_grad.tensor)
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.parametrize(("recipe", "latent"), [*((recipe, None) for recipe in RECIPES), ("delayed", 16)])
def test_a_model_of_experts_in_fp8_has_nearly_the_losses_of_bfloat16(recipe: str, latent: int | None) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 32}
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32}
    tokens, labels, positions, _ = make_batch(16, 2, 53)
    losses = []
    for precision in ({}, {"fp8_format": "hybrid", "fp8_recipe": recipe}):
        settings = {**shape, **experts, **precision, "max_position_embeddings": 16, "bf16": True}
        model = make_model(single_rank_group(), moe_latent_size=latent, **settings)
        load_global_weights(model)
        compute_in_float8([model], model.config, "cpu")
        loss = model(tokens, positions, labels=labels, losses=[]).float().mean()
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
