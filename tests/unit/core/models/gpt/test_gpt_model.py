"""The model in one process: sizes, shapes, precision, configuration, and muP's widths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config_base import from_fields
from megatron.core.device import Device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.models.gpt.gpt_config import GPTConfig, flags_without_argument, padded_vocab_size
from megatron.core.models.gpt.gpt_model import LOGIT_Z_LOSS, GPTModel, SinusoidalEmbedding
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.dropout import DropoutSamples
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer.dropout import keys_of_rank
from tests.harness.closeness import assert_gradients_close, relative_difference
from tests.harness.toy_model import SEED, load_global_weights, make_batch, make_model, make_rng

ALONE = single_rank_group()
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


def meta_model(config: GPTConfig, tp_rank: int) -> GPTModel:
    """Return the shapes of one tensor-parallel rank's model, without memory or processes."""
    state = describe_parallel_state(tp_rank, config.tensor_model_parallel_size, config.parallel_sizes)
    rng = RngStreams(Device("cpu"), 1, state.place)
    return GPTModel(config, state.tp, rng, seed=1, device="meta")


GPT2_345M = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "vocab_size": 50257,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("tp_size", "padded", "parameters"), [(1, 50304, 354_871_296), (2, 50432, 178_100_224), (4, 50688, 89_714_688)]
)
def test_gpt2_345m_has_the_parameters_that_its_users_logged(tp_size: int, padded: int, parameters: int) -> None:
    config = GPTConfig(tensor_model_parallel_size=tp_size, **GPT2_345M)
    assert config.padded_vocab_size == padded
    models = [meta_model(config, rank) for rank in range(tp_size)]
    owned = 0
    for model in models:
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        specs = [spec_of(parameter) for parameter in model.parameters()]
        owned += sum(shard.global_box.num_elements for spec in specs if spec.is_owner for shard in spec.shards)
    # One whole model without padding, counted once whatever the layout.
    assert owned == 354_871_296 - (50304 - 50257) * 1024


@pytest.mark.parametrize(
    ("tp_size", "copies_of_a_key_value_head", "parameters"),
    [(1, 1, 8_030_261_248), (8, 1, 1_004_015_616), (16, 2, 518_918_144)],
)
def test_llama_3_1_8b_has_its_published_size(tp_size: int, copies_of_a_key_value_head: int, parameters: int) -> None:
    config = GPTConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_hidden_size=14336,
        vocab_size=128256,
        make_vocab_size_divisible_by=1,
        max_position_embeddings=131072,
        tensor_model_parallel_size=tp_size,
        **(LLAMA | {"num_query_groups": 8}),
    )
    norms = (2 * 32 + 1) * 4096
    key_value_rows = 32 * 2 * 8 * 128 * 4096
    cut = 8_030_261_248 - norms + (copies_of_a_key_value_head - 1) * key_value_rows
    assert parameters == cut // tp_size + norms
    for rank in {0, tp_size - 1}:
        assert sum(parameter.numel() for parameter in meta_model(config, rank).parameters()) == parameters


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "tp_size", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 2, 50432), (50257, 128, 4, 50688), (50257, 128, 8, 51200), (128, 1, 4, 128)],
)
def test_vocabulary_padding(vocab_size: int, multiple: int, tp_size: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, multiple, tp_size) == padded


def test_names_are_megatrons_and_specs_carry_them() -> None:
    model = make_model(ALONE, num_layers=1, untie_embeddings_and_output_weights=True)
    names = [name for name, _ in model.named_parameters()]
    assert names == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.input_layernorm.bias",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.pre_mlp_layernorm.bias",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.mlp.linear_fc2.bias",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
        "output_layer.weight",
    ]
    assert [spec_of(parameter).name for parameter in model.parameters()] == names


def test_vocabulary_is_described_without_its_padding() -> None:
    model = make_model(ALONE, vocab_size=53, make_vocab_size_divisible_by=16)
    assert model.output_weight.shape == (64, 28)
    assert spec_of(model.output_weight).global_shape == (53, 28)


def losses_and_gradients(dtype: str, **config: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    model = make_model(ALONE, params_dtype=dtype, **config)
    load_global_weights(model)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    losses = model(tokens, positions, labels=labels)
    losses.mean().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        gradients[name] = parameter.grad.double().numpy()
    return losses.detach().numpy(), gradients


@pytest.mark.parametrize("config", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "gradient_tolerance"),
    [("float32", 2e-6, 2e-5), ("bfloat16", 0.03, 0.15), ("float16", 0.004, 0.02)],
)
def test_lower_precisions_stay_close_to_float64(
    config: dict[str, Any], dtype: str, loss_tolerance: float, gradient_tolerance: float
) -> None:
    """Two layers with weights of 0.25: what is stated is a few roundings of the format, and losses are float32."""
    expected, expected_gradients = losses_and_gradients("float64", **config)
    losses, gradients = losses_and_gradients(dtype, **config)
    assert expected.dtype == np.float64
    assert losses.dtype == np.float32
    assert relative_difference(losses, expected) < loss_tolerance
    assert_gradients_close(gradients, expected_gradients, gradient_tolerance)


@pytest.mark.parametrize("config", [{}, LLAMA, LLAMA | {"qk_layernorm": True}], ids=["gpt2", "llama", "qk-norm"])
def test_a_float64_model_never_rounds_to_float32(config: dict[str, Any]) -> None:
    """No operation of the forward or backward pass makes a tensor of a lower precision."""
    narrow: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
                    narrow.append(str(func))
            return output

    model = make_model(ALONE, params_dtype="float64", **config)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    with Watch():
        losses = model(tokens, positions, labels=labels)
        losses.mean().backward()
    assert losses.dtype == torch.float64
    assert narrow == []


@pytest.mark.parametrize("config", [{}, LLAMA], ids=["gpt2", "llama"])
def test_no_position_sees_a_later_token(config: dict[str, Any]) -> None:
    model = make_model(ALONE, params_dtype="float64", **config)
    tokens, _, positions, _ = make_batch(12, 3, 53)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 53
    with torch.no_grad():
        first, second = model(tokens, positions), model(changed, positions)
    assert torch.equal(first[:7], second[:7])
    assert not torch.isclose(first[7:], second[7:]).all(dim=-1).any()


def test_packed_documents_are_as_if_alone() -> None:
    model = make_model(ALONE, params_dtype="float64", **LLAMA)
    tokens, labels, _, _ = make_batch(12, 2, 53)
    document_ids = (torch.arange(12) >= 5).long().expand(2, 12)
    positions = torch.cat((torch.arange(5), torch.arange(7))).expand(2, 12)
    with torch.no_grad():
        packed = model(tokens, positions, labels=labels, pattern=AttentionPattern(document_ids=document_ids))
        alone = [
            model(tokens[:, part], positions[:, part], labels=labels[:, part]) for part in (slice(0, 5), slice(5, 12))
        ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-12, atol=1e-12)


def test_stages_one_after_another_are_the_whole_model() -> None:
    settings = LLAMA | {"params_dtype": "float64", "num_layers": 3, "hidden_dropout": 0.2, "attention_dropout": 0.1}
    whole = make_model(ALONE, **settings)
    rng = whole.rng
    samples = DropoutSamples.at(1, 0, 0, 3, "cpu")
    first = GPTModel(whole.config, ALONE, rng, seed=1234, layer_numbers=(0,), post_process=False)
    last = GPTModel(whole.config, ALONE, rng, seed=1234, layer_numbers=(1, 2), pre_process=False)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    hidden = first(tokens, positions, dropout_samples=samples)
    assert hidden.shape == (12, 3, 28)
    losses = last(tokens, positions, labels=labels, hidden=hidden, dropout_samples=samples)
    assert torch.equal(losses, whole(tokens, positions, labels=labels, dropout_samples=samples))


def test_shapes() -> None:
    model = make_model(ALONE)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    assert model(tokens, positions).shape == (12, 3, 56)
    losses = model(tokens, positions, labels=labels)
    assert losses.shape == (3, 12)
    assert losses.dtype == torch.float32


def test_initial_loss_is_that_of_guessing() -> None:
    model = make_model(ALONE)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    assert model(tokens, positions, labels=labels).mean().item() == pytest.approx(np.log(53), rel=0.01)


def test_evaluation_mode_ignores_dropout() -> None:
    plain, dropping = make_model(ALONE), make_model(ALONE, hidden_dropout=0.3, attention_dropout=0.3)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    expected = plain(tokens, positions, labels=labels)
    assert not torch.equal(dropping(tokens, positions, labels=labels), expected)
    dropping.eval()
    assert torch.equal(dropping(tokens, positions, labels=labels), expected)


@pytest.mark.parametrize("is_tied", [True, False])
def test_embeddings_may_begin_with_a_deviation_of_their_own(is_tied: bool) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "vocab_size": 500, "untie_embeddings_and_output_weights": not is_tied}
    deviations = {"init_method_std": 0.02, "embedding_init_method_std": 0.5}
    whole = make_model(ALONE, **sizes, **deviations)
    expected = {"embedding.word_embeddings.weight": 0.5, "embedding.position_embeddings.weight": 0.5}
    expected |= {"decoder.layers.0.mlp.linear_fc1.weight": 0.02}
    expected |= {} if is_tied else {"output_layer.weight": 0.02}
    found = {name: parameter.std().item() for name, parameter in whole.named_parameters() if name in expected}
    assert found == pytest.approx(expected, rel=0.1)
    last_stage = GPTModel(whole.config, ALONE, make_rng(ALONE), seed=SEED, device="cpu", pre_process=False)
    assert last_stage.output_layer is not None
    assert torch.equal(last_stage.output_layer.weight, whole.output_weight), "both ends hold the same values"


@pytest.mark.parametrize("further", [None, 2], ids=["no MTP", "MTP"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_z_loss_is_of_the_next_tokens_that_count(further: int | None, is_masked: bool) -> None:
    """Tokens outside of the mask have none, nor have the logits of MTP modules."""
    model = make_model(ALONE, z_loss_coeff=0.25, mtp_num_layers=further)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(model.config.vocab_size, (2, 2, 6), generator=generator)
    positions = torch.arange(6).expand(2, 6)
    mask = torch.ones(2, 6)
    mask[0, 2:] = 0.0
    losses: list[AuxiliaryLoss] = []
    model(tokens, positions, labels=labels, losses=losses, loss_mask=mask if is_masked else None)
    (z_loss,) = [loss for loss in losses if loss.name == LOGIT_Z_LOSS]
    logits = model(tokens, positions).transpose(0, 1)[..., : model.config.vocab_size]
    squares = logits.logsumexp(dim=-1).square()
    counted = squares[mask.bool()] if is_masked else squares
    assert z_loss.loss_sum.item() == pytest.approx(counted.sum().item(), rel=1e-5)
    assert z_loss.num_tokens.item() == counted.numel()
    assert z_loss.coefficient == 0.25


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 1.0),
        ({"scale_embeddings": True}, 28**0.5),
        ({"use_mup": True, "mup_embedding_mult": 3.0}, 3.0),
        ({"use_mup": True, "mup_embedding_mult": 3.0, "scale_embeddings": True}, 3.0 * 28**0.5),
    ],
)
def test_embeddings_are_multiplied_by_every_factor(fields: dict[str, Any], factor: float) -> None:
    embedding = make_model(single_rank_group(), params_dtype="float64", **fields).embedding
    assert embedding is not None
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.allclose(embedding.of_words(tokens), embedding.word_embeddings.weight[tokens.t()] * factor)


@pytest.mark.parametrize(("cp_rank", "positions"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_the_keys_of_a_rank_are_of_the_positions_that_it_holds(cp_rank: int, positions: list[int]) -> None:
    sizes = ParallelSizes(tp=2, cp=2)
    samples = make_rng(single_rank_group()).draw_dropout_samples(3, torch.device("cpu"))
    for tp_rank in range(2):
        state = describe_parallel_state(2 * cp_rank + tp_rank, 4, sizes)
        assert (state.cp.rank, state.tp.rank) == (cp_rank, tp_rank)
        for is_split in (True, False):
            keys = keys_of_rank(samples, (4, 2), 4, state.tp, state.cp, is_split)
            assert keys is not None
            assert keys.positions.tolist() == positions
            of_hidden = positions[2 * tp_rank : 2 * tp_rank + 2] if is_split else positions
            assert keys.positions[keys.hidden].tolist() == of_hidden
            assert (keys.layers, keys.rank) == (range(2, 5), 2 * cp_rank + tp_rank)
    alone = keys_of_rank(samples, (), 4, single_rank_group(), single_rank_group(("cp",)), False)
    assert alone is not None
    assert (alone.positions.tolist(), alone.layers, alone.rank) == ([0, 1, 2, 3], range(0), 0)
    assert keys_of_rank(None, (0,), 4, single_rank_group(), single_rank_group(("cp",)), False) is None


GPT2: dict[str, Any] = {}
SMALL_LLAMA: dict[str, Any] = {
    "swiglu": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.parametrize("settings", [GPT2, SMALL_LLAMA])
def test_flops_are_those_of_the_weights_and_of_half_the_scores(settings: dict[str, Any]) -> None:
    length = 12
    model = make_model(single_rank_group(), device="meta", num_layers=3, **settings)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    if model.output_layer is None:
        weights += model.output_weight.numel()
    # Scores and their product with the values, 4 heads of width 10, each over half of a square.
    scores = 2 * 2 * 3 * (4 * 10) * length * length / 2
    assert model.config.forward_flops_per_sequence(length) == 2 * length * weights + scores


def test_flops_of_a_window_are_those_of_a_band() -> None:
    full, windowed = (
        make_model(single_rank_group(), device="meta", num_layers=3, **settings).config.forward_flops_per_sequence(12)
        for settings in ({}, {"window_size": "3,0", "window_attn_skip_freq": "3"})
    )
    # Two layers look at 4 of 12 keys: of half a square of 12 remains what a half square of 8 leaves.
    assert full - windowed == 2 * 2 * 2 * (4 * 10) * 8 * 8 / 2


def test_shape_of_what_stages_hand_on() -> None:
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 3}
    config = GPTConfig(num_layers=2, hidden_size=28, num_attention_heads=4, **sizes)
    assert config.hidden_shape(48, 5) == (16, 5, 28)
    config = GPTConfig(num_layers=2, hidden_size=28, num_attention_heads=4, sequence_parallel=True, **sizes)
    assert config.hidden_shape(48, 5) == (8, 5, 28)


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, []),
        ({"attn_logit_softcapping": 30.0, "use_mup": True}, ["--attn-logit-softcapping 30.0", "--use-mup"]),
        ({"rope_type": "rope"}, []),
        ({"rope_type": "yarn", "rotary_scaling_factor": 4.0}, []),
        ({"rotary_scaling_factor": 4.0}, ["--rotary-scaling-factor 4.0"]),
        # Megatron's arguments hold these in another form.
        ({"window_size": "3,0", "num_experts": 4}, []),
        ({"multi_latent_attention": True, "kv_lora_rank": 8, "position_embedding_type": "rope"}, []),
        ({"multi_latent_attention": True, "position_embedding_type": "none"}, ["--position-embedding-type none"]),
        ({"kv_lora_rank": 8}, ["--kv-lora-rank 8"]),
        # A choice that Megatron does not have, of a field that it has.
        ({"normalization": "MeanAbsNorm"}, ["--normalization MeanAbsNorm"]),
        ({"num_experts": 4, "moe_router_score_function": "relu"}, ["--moe-router-score-function relu"]),
    ],
)
def test_flags_that_the_arguments_of_megatrons_files_cannot_hold(fields: dict[str, Any], flags: list[str]) -> None:
    config = from_fields(GPTConfig, num_layers=2, hidden_size=24, num_attention_heads=4, vocab_size=50, **fields)
    assert sorted(flags_without_argument(config)) == sorted(flags)


STATE = describe_parallel_state(0, 1)
HEAD, VOCABULARY = 8, 53


def shape(width: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_attention_heads": width // HEAD, "kv_channels": HEAD}
    return sizes | {"ffn_hidden_size": 2 * width, "init_method_std": 0.1}


def growth(optimizer: dict[str, Any], *, with_mup: bool) -> tuple[float, float]:
    """Return how many times more three steps move hidden states, and logits, at the large width than at the small."""
    of_widths = []
    for width in (32, 256):
        mup = {"use_mup": True, "mup_base_hidden_size": 32} if with_mup else {}
        model = make_model(single_rank_group(), **shape(width), **mup)
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), STATE)
        rule = OptimizerConfig(lr=0.01, weight_decay=0.0, clip_grad=0.0, params_dtype="float32", **optimizer)
        trained = MegatronOptimizer(rule, [ddp], STATE)
        tokens, labels, positions, _ = make_batch(14, 3, VOCABULARY)
        hidden: list[torch.Tensor] = []
        model.decoder.register_forward_hook(lambda module, inputs, output, kept=hidden: kept.append(output[0].detach()))
        logits = [model(tokens, positions).detach()]
        for _ in range(3):
            ddp.zero_grad_buffer()
            ddp(tokens, positions, labels=labels).mean().backward()
            ddp.finish_grad_sync()
            trained.step()
        logits.append(model(tokens, positions).detach())
        changes = (hidden[-1] - hidden[0], (logits[1] - logits[0])[..., :VOCABULARY])
        of_widths.append([change.square().mean().sqrt().item() for change in changes])
    (narrow_hidden, narrow_logits), (wide_hidden, wide_logits) = of_widths
    return wide_hidden / narrow_hidden, wide_logits / narrow_logits


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "adam"},
        pytest.param({"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}, marks=pytest.mark.long),
        {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "muon_scale_mode": "unit_rms_norm"},
    ],
    ids=["adam", "muon", "muon-unit-rms"],
)
def test_updates_move_activations_as_much_at_any_width(optimizer: dict[str, Any]) -> None:
    hidden, logits = growth(optimizer, with_mup=True)
    assert 0.5 < hidden < 2.0
    assert 0.5 < logits < 2.0
    _, without = growth(optimizer, with_mup=False)
    assert without > 3.0 * logits


def test_hidden_matrices_begin_smaller_and_nothing_else_does() -> None:
    base, wide = (make_model(single_rank_group(), **shape(32), use_mup=True, mup_width_mult=m) for m in (1.0, 16.0))
    for before, after in zip(base.parameters(), wide.parameters(), strict=True):
        spec = spec_of(after)
        is_hidden = before.dim() == 2 and "embeddings" not in spec.name
        assert spec.width_multiplier == (16.0 if is_hidden else 1.0)
        torch.testing.assert_close(after, before / 4.0 if is_hidden else before)


def test_the_base_width_is_the_model_without_it() -> None:
    tokens, _, positions, _ = make_batch(14, 3, VOCABULARY)
    plain = make_model(single_rank_group(), **shape(32))(tokens, positions)
    base = {"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": HEAD}
    assert torch.equal(make_model(single_rank_group(), **shape(32), **base)(tokens, positions), plain)


@pytest.mark.parametrize("width", [28, 29])
@pytest.mark.parametrize("offset", [0, 2])
def test_sinusoidal_positions_are_sines_then_cosines(width: int, offset: int) -> None:
    config = from_fields(
        GPTConfig,
        num_layers=1,
        hidden_size=width,
        num_attention_heads=1,
        vocab_size=53,
        position_embedding_type="sinusoidal",
        position_embedding_offset=offset,
        params_dtype="float64",
    )
    embedding = SinusoidalEmbedding(config, ALONE)
    assert not list(embedding.parameters())
    found, half = embedding(torch.tensor([[0, 1, 7], [3, 300, 5]])), width // 2
    assert found.shape == (3, 2, width)
    for place, row, position in ((0, 0, 0), (2, 0, 7), (1, 1, 300)):
        angles = [(position + offset) / 10000.0 ** (channel / (half - 1)) for channel in range(half)]
        expected = [*map(math.sin, angles), *map(math.cos, angles), *[0.0] * (width % 2)]
        np.testing.assert_allclose(found[place, row].numpy(), expected, rtol=1e-12, atol=1e-12)


def test_an_offset_moves_learned_positions_down_their_table() -> None:
    plain = make_model(ALONE, position_embedding_type="learned_absolute")
    moved = make_model(ALONE, position_embedding_type="learned_absolute", position_embedding_offset=2)
    table = moved.embedding.position_embeddings.weight
    assert table.shape[0] == plain.embedding.position_embeddings.weight.shape[0] + 2
    assert spec_of(table).global_shape == tuple(table.shape)
    torch.testing.assert_close(moved.embedding.position_embeddings(torch.tensor([[0, 3]]))[:, 0], table[[2, 5]])
