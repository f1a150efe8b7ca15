"""Gated delta-net, KDA, Mamba-2, gated attention: the layers of transformers, initial values, documents and padding."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import BambaConfig, FalconH1Config, KimiLinearConfig, Qwen3NextConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextGatedDeltaNet,
    Qwen3NextRotaryEmbedding,
)

from megatron.core.config_base import from_fields
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import is_hidden_matrix
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.optimizer.inner_optimizer import is_decayed
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.initialization import initialize_module
from megatron.core.transformer.gated_attention import GatedAttention
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.kimi_delta_attention import KimiDeltaAttention
from megatron.core.transformer.mamba_mixer import MambaMixer
from megatron.core.transformer.recurrent_mixer import RecurrentMixer, document_starts
from megatron.core.transformer.rotary_pos_embedding import RotaryEmbedding

HIDDEN, KEYS, VALUES = 24, 4, 6
KINDS = {"G": GatedDeltaNet, "K": KimiDeltaAttention, "M": MambaMixer}


def config(**changes: object) -> GPTConfig:
    values: dict[str, object] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "add_bias_linear": False,
        "params_dtype": "float64",
        "init_method_std": 0.2,
        "linear_key_head_dim": KEYS,
        "linear_value_head_dim": VALUES,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "mamba_state_dim": 5,
        "mamba_head_dim": 6,
        "mamba_num_groups": 2,
    }
    return from_fields(GPTConfig, **(values | changes))


def make(kind: str, tp: Group | None = None, seed: int = 5, **changes: object) -> RecurrentMixer:
    whole = tp or single_rank_group()
    described = config(hybrid_override_pattern=kind, tensor_model_parallel_size=whole.size, **changes)
    mixer = KINDS[kind](described, 0, whole, "cpu")
    initialize_module(mixer, seed)
    return mixer


def perturb(module: torch.nn.Module) -> None:
    """Change every parameter, so that none is 0 or 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def hidden_states(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(length, batch, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_output(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Compare ``[s, b, h]`` with ``[b, s, h]``; their recurrences are in float32."""
    torch.testing.assert_close(ours.transpose(0, 1), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_centered", [False, True])
def test_a_gated_delta_net_is_that_of_qwen3_next(is_centered: bool) -> None:
    mixer = make("G", apply_layernorm_1p=is_centered)
    perturb(mixer)
    settings = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=KEYS,
        linear_value_head_dim=VALUES,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
    )
    theirs = Qwen3NextGatedDeltaNet(settings, 0).double()
    rows = (2 * KEYS, 2 * KEYS, 6 * VALUES, 6 * VALUES, 6, 6)
    # Their rows are interleaved per key head.
    parts = [part.detach().view(2, -1, HIDDEN) for part in mixer.in_proj.weight.split(rows)]
    with torch.no_grad():
        theirs.in_proj_qkvz.weight.copy_(torch.cat(parts[:4], dim=1).flatten(0, 1))
        theirs.in_proj_ba.weight.copy_(torch.cat(parts[4:], dim=1).flatten(0, 1))
        theirs.conv1d.weight.copy_(mixer.conv1d.weight)
        theirs.A_log.copy_(mixer.A_log)
        theirs.dt_bias.copy_(mixer.dt_bias)
        theirs.norm.weight.copy_(mixer.out_norm.weight + float(is_centered))
        theirs.out_proj.weight.copy_(mixer.out_proj.weight)
        x = hidden_states(71)
        check_output(mixer(x, CAUSAL, None).hidden, theirs(x.transpose(0, 1)))


def test_a_kimi_delta_attention_is_that_of_kimi_linear() -> None:
    heads, dim = 3, 6
    mixer = make(
        "K", linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=dim, norm_epsilon=1e-3
    )
    perturb(mixer)
    settings = KimiLinearConfig(
        hidden_size=HIDDEN,
        linear_num_heads=heads,
        linear_head_dim=dim,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-3,
        num_hidden_layers=1,
    )
    theirs = KimiLinearDeltaAttention(settings, 0).double()
    ours = dict(mixer.named_parameters())
    qkvb = zip("qkvb", ours["in_proj.weight"].detach().split((heads * dim,) * 3 + (heads,)))
    ours |= {f"{name}_proj.weight": rows for name, rows in qkvb}
    ours |= {"o_norm.weight": ours["out_norm.weight"], "o_proj.weight": ours["out_proj.weight"]}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours[name.removeprefix("forget_gate.")].view(parameter.shape))
        x = hidden_states(71)
        check_output(mixer(x, CAUSAL, None).hidden, theirs(x.transpose(0, 1)))


def test_a_mamba_mixer_is_that_of_bamba() -> None:
    mixer = make("M")
    perturb(mixer)
    settings = BambaConfig(
        hidden_size=HIDDEN,
        mamba_n_heads=8,
        mamba_d_head=6,
        mamba_n_groups=2,
        mamba_d_state=5,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=16,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    theirs = BambaMixer(settings, 0).double()
    copy_parameters(mixer, theirs)
    with torch.no_grad():
        x = hidden_states(45)
        check_output(mixer(x, CAUSAL, None).hidden, theirs(x.transpose(0, 1)))


def test_a_mamba_mixer_with_biases_and_limited_steps_is_that_of_bamba() -> None:
    mixer = make(
        "M",
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        mamba_conv_kernel_dim=3,
        mamba_num_groups=1,
        mamba_dt_lower_limit=0.01,
        mamba_dt_upper_limit=0.05,
    )
    perturb(mixer)
    settings = BambaConfig(
        hidden_size=HIDDEN,
        mamba_n_heads=8,
        mamba_d_head=6,
        mamba_n_groups=1,
        mamba_d_state=5,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        time_step_limit=[0.01, 0.05],
        mamba_chunk_size=16,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    theirs = BambaMixer(settings, 0).double()
    copy_parameters(mixer, theirs)
    x = hidden_states(45)
    with torch.no_grad():
        expected = theirs(x.transpose(0, 1))
        check_output(mixer(x, CAUSAL, None).hidden, expected)
        mixer.dt_limits = (0.0, None)
        assert (mixer(x, CAUSAL, None).hidden.transpose(0, 1) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("norm", ["after-gate", "before-gate", "none"])
def test_a_mamba_mixer_with_multipliers_is_that_of_falcon_h1(norm: str) -> None:
    multipliers = (0.7, 1.2, 0.8, 1.1, 0.9)
    mixer = make("M", mamba_norm=norm, mamba_multipliers=multipliers)
    perturb(mixer)
    settings = FalconH1Config(
        hidden_size=HIDDEN,
        mamba_d_ssm=48,
        mamba_n_heads=8,
        mamba_d_head=6,
        mamba_n_groups=2,
        mamba_d_state=5,
        mamba_chunk_size=16,
        mamba_rms_norm=norm != "none",
        mamba_norm_before_gate=norm == "before-gate",
        ssm_multipliers=list(multipliers),
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    theirs = FalconH1Mixer(settings, 0).double()
    theirs.mup_vector = compute_mup_vector(settings).double()
    copy_parameters(mixer, theirs)
    x = hidden_states(45)
    with torch.no_grad():
        check_output(mixer(x, CAUSAL, None).hidden, theirs(x.transpose(0, 1)))


def copy_parameters(mixer: RecurrentMixer, theirs: torch.nn.Module) -> None:
    ours = dict(mixer.named_parameters())
    assert ours.keys() == dict(theirs.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours[name])


def test_a_gated_attention_is_that_of_qwen3_next() -> None:
    described = config(attention_output_gate=True, apply_layernorm_1p=True, qk_layernorm=True, rotary_percent=0.5)
    attention = GatedAttention(described, 0, single_rank_group(), "cpu").eval()
    initialize_module(attention, 2)
    perturb(attention)
    settings = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
    )
    theirs = Qwen3NextAttention(settings, 0).double().eval()
    query, gate, key, value = attention.linear_qkv.weight.detach().view(2, -1, HIDDEN).split((16, 16, 8, 8), dim=1)
    # Their rows have each head's query and gate.
    of_heads = torch.stack((query.reshape(4, 8, HIDDEN), gate.reshape(4, 8, HIDDEN)), dim=1)
    length = 9
    x, positions = hidden_states(length), torch.arange(length).expand(2, -1)
    with torch.no_grad():
        theirs.q_proj.weight.copy_(of_heads.flatten(0, 2))
        theirs.k_proj.weight.copy_(key.flatten(0, 1))
        theirs.v_proj.weight.copy_(value.flatten(0, 1))
        theirs.o_proj.weight.copy_(attention.linear_proj.weight)
        theirs.q_norm.weight.copy_(attention.q_layernorm.weight)
        theirs.k_norm.weight.copy_(attention.k_layernorm.weight)
        batch_first = x.transpose(0, 1)
        angles = Qwen3NextRotaryEmbedding(settings)(batch_first, positions)
        mask = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)[None, None]
        expected, _ = theirs(batch_first, position_embeddings=angles, attention_mask=mask)
        own_angles = RotaryEmbedding(described.rotary_dim, 10000).angles(positions, torch.float64)
        check_output(attention(x, CAUSAL, own_angles).hidden, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_the_published_ones_and_the_same_at_any_layout(kind: str) -> None:
    mixer = make(kind, linear_num_key_heads=64, linear_num_value_heads=64, mamba_num_heads=64)
    rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 3
    assert 14 < rates.max() <= 16
    assert 1e-3 * 0.999 <= steps.min() < 2e-3
    assert 5e-2 < steps.max() <= 1e-1 * 1.001
    assert 0.2 < (steps.log10() > -2).double().mean() < 0.8
    assert 0.45 < mixer.conv1d.weight.abs().max() <= 0.5
    whole = dict(mixer.named_parameters())
    for rank in range(2):
        state = describe_parallel_state(rank, 2, ParallelSizes(tp=2))
        part = make(kind, state.tp, linear_num_key_heads=64, linear_num_value_heads=64, mamba_num_heads=64)
        for name, parameter in part.named_parameters():
            spec = spec_of(parameter)
            assert spec.global_shape == whole[name].shape
            for shard in spec.shards:
                values = parameter[shard.local_box.slices]
                assert torch.equal(values, whole[name][shard.global_box.slices]), name


@pytest.mark.parametrize("kind", KINDS)
def test_only_projections_are_matrices_and_vectors_do_not_decay(kind: str) -> None:
    parameters = dict(make(kind).named_parameters())
    matrices = {name for name, parameter in parameters.items() if is_orthogonalized(spec_of(parameter))}
    low_rank = {f"{name}_proj.weight" for name in ("f_a", "f_b", "g_a", "g_b")} if kind == "K" else set()
    assert matrices == {"in_proj.weight", "out_proj.weight", *low_rank}
    decayed = {name for name, parameter in parameters.items() if is_decayed(f"decoder.layers.0.{name}", parameter)}
    assert decayed == {*matrices, "conv1d.weight"}
    for name, parameter in parameters.items():
        assert sum(spec_of(parameter).fused_rows) in (0, parameter.shape[0])
        renamed = spec_of(parameter).with_prefix("conv1d." if name == "conv1d.weight" else "")
        assert is_hidden_matrix(renamed) == (name in matrices)


@pytest.mark.parametrize("kind", KINDS)
def test_no_state_passes_from_one_document_to_the_next(kind: str) -> None:
    mixer, lengths = make(kind), (5, 2, 70, 1, 9)
    perturb(mixer)
    x = hidden_states(sum(lengths), batch=1).requires_grad_()
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    packed = mixer(x, AttentionPattern(document_ids=ids), None).hidden
    alone = [mixer(part, CAUSAL, None).hidden for part in x.split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-11, atol=1e-12)
    (gradient,) = torch.autograd.grad(packed[5:7].sum(), x)
    assert gradient[5:7].abs().min() > 0
    # What is in front is computed in the same chunk, and cancels except for rounding.
    assert gradient[:5].abs().max() < 1e-15
    assert not gradient[7:].any()


def test_states_are_reset_after_padding() -> None:
    """Row 0 has two columns of padding, row 1 has none."""
    real = torch.arange(6)[None, None] >= torch.tensor([2, 0])[:, None, None]
    columns = torch.arange(6)
    mask = ((columns[:, None] >= columns) & real | torch.eye(6, dtype=torch.bool))[:, None]
    starts = torch.tensor([[False, True, True, False, False, False], [False] * 6])
    found = document_starts(AttentionPattern(mask=mask), 6)
    assert found is not None
    assert torch.equal(found, starts)
    later = document_starts(AttentionPattern(mask=mask[:, :, 2:]), 4)
    assert later is not None
    assert torch.equal(later, starts[:, 2:])
