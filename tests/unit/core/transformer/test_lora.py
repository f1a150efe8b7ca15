"""Low-rank adapters: their first values, what they add, and that nothing else is trained or costs memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config_base import from_fields
from megatron.core.device import Device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_config import ONE_RANK
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import held_of, quantized_of, spec_of
from megatron.core.tensor_parallel.lora import LowRankAdapter
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer.lora_targets import adapted_parts

LAYER = "decoder.layers.1."
SHAPES = {
    "self_attention.linear_qkv.adapters.q": ((3, 24), (24, 3)),
    "self_attention.linear_qkv.adapters.v": ((3, 24), (12, 3)),
    "self_attention.linear_proj.adapters.all": ((3, 24), (24, 3)),
    "mlp.linear_fc1.adapters.up": ((3, 24), (40, 3)),
    "mlp.linear_fc2.adapters.all": ((3, 40), (24, 3)),
}
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def make_model(seed: int = 7, **fields: Any) -> GPTModel:
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"ffn_hidden_size": 40, "vocab_size": 52, "max_position_embeddings": 16}
    adapters = {"lora_rank": 3, "lora_alpha": 6.0, "lora_target_modules": TARGETS}
    chosen: dict[str, Any] = {**sizes, **adapters, "swiglu": True, "params_dtype": "float64"} | fields
    config = from_fields(GPTConfig, **chosen)
    return GPTModel(config, single_rank_group(), RngStreams(Device("cpu"), 0, ONE_RANK.place()), seed=seed)


def test_adapters_begin_as_in_the_paper_and_by_name_alone() -> None:
    model, plain = make_model(), make_model(lora_rank=0)
    parameters = {spec_of(parameter).name: parameter for parameter in model.parameters()}
    for name, (down, up) in SHAPES.items():
        a, b = (parameters[f"{LAYER}{name}.lora_{letter}"] for letter in "AB")
        assert (tuple(a.shape), tuple(b.shape)) == (down, up)
        bound = down[1] ** -0.5
        assert 0.8 * bound < a.abs().max() <= bound
        assert abs(a.mean()) < 0.2 * bound
        assert not b.any()
    assert len([name for name in parameters if "adapters" in name]) == 2 * 2 * len(SHAPES)
    for parameter in plain.parameters():
        assert torch.equal(parameters[spec_of(parameter).name], parameter)
    fewer = {spec_of(p).name: p for p in make_model(lora_target_modules=("v_proj",)).parameters()}
    assert all(torch.equal(parameters[name], values) for name, values in fewer.items())


def adapters_of(model: GPTModel, number: str) -> list[tuple[str, LowRankAdapter]]:
    layer = model.decoder.layers[number]
    return [
        (f"{number}.{name}", module) for name, module in layer.named_modules() if isinstance(module, LowRankAdapter)
    ]


@torch.no_grad()
def test_recurrent_layers_have_adapters_of_their_projections() -> None:
    fields: dict[str, Any] = {
        "num_layers": 6,
        "hybrid_override_pattern": "MG*-KP",
        "mamba_head_dim": 6,
        "mamba_num_groups": 4,
        "mamba_state_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "lora_target_modules": (),
    }
    model, dense = make_model(**fields), make_model(**fields, lora_rank=0)
    adapted = {name.partition(".adapters.")[0] for name, _ in model.named_parameters() if ".adapters." in name}
    layers = "decoder.layers."
    assert {name.removeprefix(layers) for name in adapted} == {
        *("0.mixer.in_proj", "0.mixer.out_proj", "1.self_attention.in_proj", "1.self_attention.out_proj"),
        *("2.self_attention.linear_qkv", "2.self_attention.linear_proj", "3.mlp.linear_fc1", "3.mlp.linear_fc2"),
        *("4.self_attention.in_proj", "4.self_attention.out_proj", "5.mixer.mamba.in_proj", "5.mixer.mamba.out_proj"),
        *("5.mixer.self_attention.linear_qkv", "5.mixer.self_attention.linear_proj"),
    }
    # Each adapter of a layer has a dropout of its own.
    both = {name.split(".")[3]: adapter.site for name, adapter in adapters_of(model, "5")}
    assert both == {"linear_qkv": 0, "in_proj": 4, "linear_proj": 6, "out_proj": 7}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".adapters." in name)
        if name.endswith("lora_B"):
            parameter.normal_()
    # The slow path: the adapters' product in the weights of the plain model.
    plain = dict(dense.named_parameters())
    for name in adapted:
        adapter = model.get_submodule(name).adapters.all
        plain[f"{name}.weight"] += 2.0 * adapter.lora_B @ adapter.lora_A
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(model.eval()(tokens, tokens), dense.eval()(tokens, tokens), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_adapters_add_their_product_to_the_rows_of_their_part() -> None:
    model = make_model()
    linear = model.decoder.layers["1"].self_attention.linear_qkv
    for adapter in linear.adapters.children():
        adapter.lora_B.normal_()
    x = torch.randn(5, 2, 24, dtype=torch.float64)
    parts = {name: 2.0 * a.lora_B @ a.lora_A for name, a in linear.adapters.named_children()}
    grouped = [parts["q"].view(2, 12, 24), torch.zeros(2, 6, 24), parts["v"].view(2, 6, 24)]
    weight = linear.weight + torch.cat(grouped, dim=1).reshape(48, 24)
    assert torch.allclose(linear(x), x @ weight.t() + linear.bias)


def test_the_base_has_no_gradient_memory_and_no_optimizer_state() -> None:
    model = make_model(params_dtype="bfloat16")
    state = describe_parallel_state(0, 1)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), state)
    trained = sum(a * b + c * d for (a, b), (c, d) in SHAPES.values()) * 2
    assert trained < sum(p.numel() for p in model.parameters()) / 3
    # Gradients in float32, each tensor's with up to 63 elements of padding; a main parameter and two moments.
    num_tensors = 2 * 2 * len(SHAPES)
    assert sum(buffer.grad_data.nbytes for buffer in ddp.grad_buffers) < 4 * (trained + 64 * num_tensors)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, params_dtype="bfloat16"), [ddp], state)
    held = [tensor for tensor in optimizer.held_tensors() if tensor.dim()]
    assert sum(tensor.nbytes for tensor in held) == 3 * 4 * trained
    tokens = torch.arange(16)[None]
    model(tokens, tokens, labels=tokens).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_names_and_what_is_wrong_with_them() -> None:
    assert adapted_parts((), is_gated=True) == dict.fromkeys(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), ("all",)
    )
    assert adapted_parts(("c_attn", "c_proj"), is_gated=False) == dict.fromkeys(
        ("linear_qkv", "linear_proj", "linear_fc2"), ("all",)
    )
    assert adapted_parts(("v_proj", "q_proj", "q_proj"), is_gated=True) == {"linear_qkv": ("q", "v")}
    with pytest.raises(
        ValueError, match=r"^c_fc is not a linear layer of this model; its linear layers are linear_qkv .* down_proj$"
    ):
        adapted_parts(("c_fc",), is_gated=True)
    with pytest.raises(
        ValueError, match=r"the adapter of linear_fc1 already covers gate_proj up_proj; omit one of them$"
    ):
        adapted_parts(("up_proj", "linear_fc1", "gate_proj"), is_gated=True)


WHOLE_BLOCKS: dict[str, Any] = {"hidden_size": 128, "kv_channels": 32, "ffn_hidden_size": 192}
WHOLE_BLOCKS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def test_quantized_base_weights_give_the_gradients_of_their_dequantized_values() -> None:
    model = make_model(**WHOLE_BLOCKS, lora_base_quantization="nf4")
    dense = make_model(**WHOLE_BLOCKS)
    own, theirs = ({spec_of(p).name: p for p in each.parameters()} for each in (model, dense))
    assert own.keys() == theirs.keys()
    linears = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
    quantized = {name for name, parameter in own.items() if quantized_of(parameter) is not None}
    assert quantized == {name for name in own if name.endswith(linears)}
    with torch.no_grad():
        for name, parameter in theirs.items():
            storage = quantized_of(own[name])
            if storage is not None:
                error = (storage.dense() - parameter).norm() / parameter.norm()
                assert 0.05 < error < 0.15  # That of NormalFloat for normal weights.
                parameter.copy_(storage.dense())
            elif name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
                own[name].copy_(parameter)
            else:
                assert torch.equal(parameter, own[name])
    tokens = torch.arange(16)[None]
    losses = [each(tokens, tokens, labels=tokens).sum() for each in (model, dense)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for name, parameter in theirs.items():
        grad = own[name].grad
        assert (parameter.grad is None) == (grad is None) == ("lora" not in name)
        if grad is not None:
            assert torch.allclose(grad, parameter.grad)
            assert grad.any()
    assert all(own[name].untyped_storage().nbytes() == 0 for name in quantized)


def test_quantized_base_weights_train_as_well_as_unquantized_ones() -> None:
    tokens = torch.randint(52, (4, 17), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(4, 16)
    losses = []
    for kind in (None, "nf4"):
        model = make_model(**WHOLE_BLOCKS, lora_base_quantization=kind, params_dtype="float32")
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        of_kind = []
        for _ in range(40):
            loss = model(tokens[:, :-1], positions, labels=tokens[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            of_kind.append(loss.item())
        losses.append(of_kind)
    plain, quantized = losses
    assert plain[-1] < 0.65 * plain[0]
    assert quantized[0] != plain[0]
    assert quantized == pytest.approx(plain, rel=0.05)


def test_experts_are_quantized_and_routers_are_not() -> None:
    fields = {"num_experts": 2, "moe_ffn_hidden_size": 64, "lora_target_modules": ("linear_qkv",), "swiglu": False}
    model = make_model(**WHOLE_BLOCKS | fields, lora_base_quantization="fp4", lora_double_quantization=False)
    for name, parameter in model.named_parameters():
        is_linear = name.endswith(("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight"))
        assert (quantized_of(parameter) is not None) == is_linear
        if ".experts." in name and is_linear:
            shapes = {spec.name.rpartition(".")[2]: tuple(values.shape) for spec, values in held_of(parameter)}
            rows, columns = parameter.shape[1:]
            assert shapes == {"codes": (2, rows, columns // 2), "absmax": (2, rows, columns // 64)}
