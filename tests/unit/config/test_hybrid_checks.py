"""Checks of hybrid models: patterns, shapes and combinations are answered in one line that says what works."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.checks.hybrid import flags_of_absent_layers
from megatron.core.config_base import field_specs, with_fields
from megatron.core.errors import ConfigurationError
from megatron.core.transformer.hybrid_config import (
    NAMES,
    RECURRENT_KINDS,
    SYMBOLS,
    HybridConfig,
    LayerParts,
    parse_hybrid_pattern,
)
from tests.unit.config.test_model_checks import BASE

DELTA = "--experimental-attention-variant gated_delta_net"
KDA = "--experimental-attention-variant kimi_delta_attention"
DSA = "--experimental-attention-variant dsa --position-embedding-type rope"
WHOLE_DSA = (
    f"{DSA} --multi-latent-attention --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 8 "
    "--dsa-indexer-loss-coeff 1e-2"
)
FOUR = f"{DELTA} --linear-attention-freq 4"
MIXED = "--hybrid-override-pattern M*-M"
WRONG = [
    (DELTA, "needs --linear-attention-freq; pass 4 for attention in every 4th layer"),
    ("--linear-attention-freq 4", "has no effect without --experimental-attention-variant"),
    (f"{FOUR} {MIXED}", "exclude each other; omit one of them"),
    (f"{DELTA} --linear-attention-freq [1,0]", "the list has 2 entries, but the model has 4 layers; use a list of 4"),
    (f"{DELTA} --linear-attention-freq 1", "gives linear attention to none of the 4 layers; use a list with a 1"),
    (f"{FOUR} --linear-num-value-heads 24", "not divisible by --linear-num-key-heads 16; numbers of key heads that"),
    (f"{FOUR} --mamba-state-dim 8", "--mamba-state-dim 8 has no effect without --hybrid-override-pattern"),
    (
        "--linear-num-key-heads 4",
        "--linear-num-key-heads 4 has no effect: the model has no gated delta-net or KDA layer; omit",
    ),
    (
        f"{MIXED} --linear-conv-kernel-dim 2",
        "--linear-conv-kernel-dim 2 has no effect: the model has no gated delta-net",
    ),
    ("--hybrid-override-pattern G*-- --mamba-state-dim 8", "has no effect: the model has no Mamba-2 layer; omit it"),
    ("--hybrid-override-pattern M*-", "the pattern has 3 layers; use --num-layers 3"),
    ("--hybrid-override-pattern M*-X", "X is no kind of layer; use M (mamba), * (attention), G (gated_delta_net)"),
    ("--hybrid-override-pattern [mamba,dense]*2", "dense is no kind of layer; use mamba, attention, gated_delta_net"),
    ("--hybrid-override-pattern [mamba,[mlp]]*2", "a list such as [mamba,mlp]*3+[attention,mlp], are expected"),
    ("--hybrid-override-pattern [mamba]*attention", "a list such as [mamba,mlp]*3+[attention,mlp], are expected"),
    ("--hybrid-override-pattern (mamba)", "a list such as [mamba,mlp]*3+[attention,mlp], are expected"),
    ("--hybrid-override-pattern [mamba,0]*2", "0 is no kind of layer; use mamba, attention, gated_delta_net"),
    ("--hybrid-override-pattern=", "the pattern is empty; use M (mamba), * (attention), G (gated_delta_net)"),
    ("--hybrid-override-pattern M*E-", "has layers of experts (E); add --num-experts"),
    (f"{MIXED} --num-experts 8", "has no layer of experts (E) for --num-experts 8; omit it"),
    ("--hybrid-override-pattern M*E- --num-experts 8 --moe-layer-freq 2", "omit --moe-layer-freq 2"),
    (
        f"{MIXED} --norm-placement post",
        "is not supported with --norm-placement post, which needs layers with attention",
    ),
    (f"{MIXED} --use-parallel-residual", "is not supported with --use-parallel-residual"),
    (
        "--hybrid-override-pattern M-M- --mtp-num-layers 1 --no-position-embedding",
        "--mtp-num-layers 1: the layer of an MTP module has attention and experts or an MLP, which "
        "--hybrid-override-pattern M-M- does not have; use a pattern with * and with E or -",
    ),
    (f"{MIXED} --mamba-head-dim 24", "twice --hidden-size 32 is not divisible by --mamba-head-dim 24"),
    (f"{MIXED} --mamba-num-heads 12", "12 Mamba-2 heads are not divisible by --mamba-num-groups 8; numbers of groups"),
    (f"{MIXED} --mamba-multipliers 1 2", "--mamba-multipliers 1.0 2.0: five numbers greater than 0 are expected"),
    (f"{MIXED} --mamba-multipliers 1 2 0 1 1", "five numbers greater than 0 are expected, of z, x, B, C and dt"),
    (
        f"{MIXED} --mamba-dt-lower-limit 2 --mamba-dt-upper-limit 1",
        "--mamba-dt-lower-limit 2.0 is above --mamba-dt-upper-limit 1.0; use a smaller lower limit",
    ),
    (
        f"{MIXED} --parallel-mamba-multiplier 2",
        "--parallel-mamba-multiplier 2.0 has no effect: the model has no layer of attention and Mamba-2; omit it",
    ),
    (
        "--parallel-mamba-multiplier 2",
        "--parallel-mamba-multiplier 2.0 has no effect without --hybrid-override-pattern",
    ),
    ("--mlp-gate-multiplier 2", "--mlp-gate-multiplier 2.0 applies only to gated FFN layers; add --swiglu"),
    (
        "--hybrid-override-pattern P-P- --bf16 --fp8-format hybrid --mamba-num-heads 8 --mamba-head-dim 8",
        "--mamba-num-heads 8 gives the projections of a Mamba-2 layer 2184 rows and 64 columns on each tensor-parallel "
        "rank, but --fp8-format hybrid needs a multiple of 16; use --mamba-num-heads 16",
    ),
    (
        "--hybrid-override-pattern P-P- --bf16 --fp8-format hybrid --mamba-num-heads 16 --kv-channels 6",
        "--kv-channels 6 makes 24 query channels and 72 query, key and value channels on each tensor-parallel rank",
    ),
    (
        f"{KDA} --linear-attention-freq 4 --bf16 --fp8-format hybrid --linear-value-head-dim 20",
        "--linear-value-head-dim 20 is the width of the low-rank projections of a KDA layer, but --fp8-format hybrid "
        "needs a multiple of 16; use 32",
    ),
    (
        "--hybrid-override-pattern K-*- --bf16 --fp4-format e2m1 --linear-num-key-heads 8 --linear-key-head-dim 6",
        "--linear-key-head-dim 6 makes 48 key channels of a KDA layer on each tensor-parallel rank, but --fp4-format "
        "e2m1 needs a multiple of 32; use 8",
    ),
    (
        "--hybrid-override-pattern K-*- --lora-rank 2 --lora-base-quantization nf4 --linear-value-head-dim 96",
        "--linear-value-head-dim 96 is not a whole number of blocks of 64 input features; omit it",
    ),
    (
        "--hybrid-override-pattern P-P- --lora-rank 2 --lora-target-modules f_a_proj",
        "f_a_proj is not a linear layer of this model; its linear layers are linear_qkv linear_proj linear_fc1",
    ),
    (
        f"{FOUR} --bf16 --fp8-format hybrid --linear-num-key-heads 2 --linear-num-value-heads 6 "
        "--linear-key-head-dim 8 --linear-value-head-dim 8",
        "--linear-num-value-heads 6 gives the projections of a gated delta-net layer 140 rows and 48 columns on each "
        "tensor-parallel rank, but --fp8-format hybrid needs a multiple of 16; use --linear-num-value-heads 8",
    ),
    (
        f"{MIXED} --bf16 --fp4-format e2m1 --mamba-num-heads 8 --mamba-head-dim 8",
        "--mamba-num-heads 8 gives the projections of a Mamba-2 layer 2184 rows and 64 columns on each tensor-parallel "
        "rank, but --fp4-format e2m1 needs a multiple of 32; use --mamba-num-heads 32",
    ),
    (
        f"{MIXED} --lora-rank 2 --lora-target-modules x_proj",
        "x_proj is not a linear layer of this model; its linear layers are linear_qkv linear_proj linear_fc1 "
        "linear_fc2 in_proj out_proj q_proj",
    ),
    (
        "--hybrid-override-pattern MMGG --lora-rank 2 --lora-target-modules linear_qkv",
        "linear_qkv is not a linear layer of this model; its linear layers are in_proj out_proj",
    ),
    (
        "--hybrid-override-pattern MMGG --mamba-head-dim 8 --lora-rank 2 --lora-base-quantization nf4 "
        "--hidden-size 64 --linear-num-value-heads 16 --linear-value-head-dim 6",
        "--linear-num-value-heads x --linear-value-head-dim 96 is not a whole number of blocks of 64 input features",
    ),
    (
        f"{FOUR} --normalization RMSNorm --save x --ckpt-format torch_dist",
        "--ckpt-format torch_dist cannot store a model with gated delta-net without --swiglu",
    ),
    (
        "--hybrid-override-pattern M-*G --save x --ckpt-format torch",
        "cannot store a model with G in --hybrid-override-pattern M-*G",
    ),
    (
        "--hybrid-override-pattern M-*- --mamba-norm none --save x --ckpt-format torch",
        "cannot store a model with --mamba-norm none",
    ),
    ("--hybrid-override-pattern M-M- --qk-layernorm", "--qk-layernorm has no effect: the model has no attention layer"),
    ("--hybrid-override-pattern M-M- --clip-qkv 2", "--clip-qkv 2.0 has no effect: the model has no attention layer"),
    (
        "--hybrid-override-pattern M-M- --disable-bias-linear --add-proj-bias",
        "--add-proj-bias has no effect: the model has no attention layer; omit it",
    ),
    (
        "--hybrid-override-pattern M-M- --position-embedding-type alibi",
        "--position-embedding-type alibi has no effect: the model has no attention layer; use none",
    ),
    (
        "--hybrid-override-pattern M-M- --log-max-attention-logit",
        "--log-max-attention-logit has no effect: the model has no attention layer; omit it",
    ),
    (
        "--hybrid-override-pattern M*M* --mlp-output-multiplier 2",
        "--mlp-output-multiplier 2.0 has no effect: the model has no feed-forward layer; omit it",
    ),
    ("--hybrid-override-pattern M*M* --swiglu", "--swiglu has no effect: the model has no feed-forward layer; omit it"),
    (
        "--hybrid-override-pattern M*M* --gemm-activation-fusion",
        "--gemm-activation-fusion has no effect: the model has no feed-forward layer; omit it",
    ),
    (
        "--hybrid-override-pattern M-M- --softmax-scale 2",
        "--softmax-scale 2.0 has no effect: the model has no attention layer; omit it",
    ),
    (
        "--hybrid-override-pattern M-M- --query-pre-attn-scalar 2",
        "--query-pre-attn-scalar 2 has no effect: the model has no attention layer; omit it",
    ),
    (
        "--hybrid-override-pattern G-K- --rope-type yarn --attention-temperature-beta 0.1",
        "--attention-temperature-beta 0.1 has no effect: the model has no attention layer; omit it",
    ),
    (
        "--hybrid-override-pattern M-M- --position-embedding-type rope",
        "--position-embedding-type rope has no effect: the model has no attention layer; use none",
    ),
    (
        "--hybrid-override-pattern M-M- --use-rotary-position-embeddings",
        "--use-rotary-position-embeddings has no effect: the model has no attention layer; omit it",
    ),
    (
        "--hybrid-override-pattern M-M- --position-embedding-type rope --rotary-percent 0.5",
        "--rotary-percent 0.5 has no effect: the model has no attention layer; omit it",
    ),
    (
        "--hybrid-override-pattern M*P* --squared-relu",
        "--squared-relu has no effect: the model has no feed-forward layer; omit it",
    ),
    (
        "--hybrid-override-pattern M*M* --activation-func squared_relu",
        "--activation-func squared_relu has no effect: the model has no feed-forward layer; omit it",
    ),
    ("--attention-output-gate --multi-latent-attention", "exclude each other"),
    (DSA, "--experimental-attention-variant dsa needs --multi-latent-attention; add it"),
    (DSA, "--experimental-attention-variant dsa needs --dsa-indexer-topk; DeepSeek-V3.2 has 2048"),
    (DSA, "needs --dsa-indexer-loss-coeff, without which the indexer is not trained; pass 1e-2, or 0 to keep"),
    ("--dsa-indexer-topk 8", "--dsa-indexer-topk 8 has no effect without --experimental-attention-variant"),
    (f"{FOUR} --dsa-indexer-topk 8", "--dsa-indexer-topk 8 has no effect without --experimental-attention-variant dsa"),
    (f"{WHOLE_DSA} --dsa-indexer-head-dim 8", "--dsa-indexer-head-dim 8 is below --qk-pos-emb-head-dim 64"),
    (
        f"{WHOLE_DSA} --context-parallel-size 2",
        "dsa does not support --cp-comm-type p2p; use --cp-comm-type all_gather",
    ),
    (f"{WHOLE_DSA} --window-size 4,0", "dsa is not supported with --window-size 4,0; omit --window-size 4,0"),
    (f"{WHOLE_DSA} --softmax-type learnable", "dsa is not supported with --softmax-type learnable; omit"),
    (f"{WHOLE_DSA} --linear-attention-freq 2", "dsa is not supported with --linear-attention-freq 2; omit"),
    (f"{WHOLE_DSA} --hybrid-override-pattern M*-M", "dsa is not supported with --hybrid-override-pattern M*-M; omit"),
    (f"{WHOLE_DSA} --dsa-indexer-layer-freq [1,0]", "the list has 2 entries, but the model has 4 layers"),
    (f"{WHOLE_DSA} --dsa-indexer-layer-freq [0,1,1,1]", "layer 1 has no indexer, but starts a pipeline stage"),
    (
        f"{WHOLE_DSA} --dsa-indexer-layer-freq 3 --pipeline-model-parallel-size 2",
        "layer 3 has no indexer, but starts a pipeline stage (Ett|ttL), which does not receive the keys",
    ),
    (f"{WHOLE_DSA} --save x --ckpt-format torch", "cannot store a model with --experimental-attention-variant dsa"),
    (f"{KDA} --linear-attention-freq 1", "gives linear attention to none of the 4 layers; use a list with a 1"),
    (f"{KDA} --linear-attention-freq 4 --linear-num-value-heads 24", "not divisible by --linear-num-key-heads 16"),
    (
        "--multi-latent-attention --no-position-embedding --rotary-scaling-factor 4",
        "--rotary-scaling-factor 4.0 has no effect with --position-embedding-type none; omit it",
    ),
    (
        "--multi-latent-attention --no-position-embedding --save x --ckpt-format torch",
        "cannot store a model with --position-embedding-type none",
    ),
    (
        f"{KDA} --linear-attention-freq 4 --lora-rank 2 --lora-target-modules f_b_proj",
        "f_b_proj is not a linear layer of this model; its linear layers are linear_qkv linear_proj linear_fc1",
    ),
    ("--attention-output-gate --lora-rank 2", "exclude each other"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_problem_is_one_line_that_says_what_works(words: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*BASE.split(), *words.split()], 1)
    found = [problem for problem in caught.value.problems if message in problem]
    assert found, caught.value.problems
    assert "\n" not in found[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{FOUR} --linear-num-key-heads 3 --linear-num-value-heads 6", "--linear-num-key-heads 3 is not divisible by"),
        (f"{MIXED} --mamba-num-groups 3 --mamba-num-heads 6", "--mamba-num-groups 3 is not divisible by"),
        (f"{MIXED} --mamba-num-groups 1 --mamba-num-heads 5", "5 Mamba-2 heads are not divisible by --tensor-model"),
        (
            f"{MIXED} --mamba-num-groups 1 --mamba-num-heads 4 --mamba-state-dim 5",
            "--mamba-num-groups 1 x --mamba-state-dim 5 is not divisible by --tensor-model-parallel-size 2, whose",
        ),
        (
            f"{MIXED} --bf16 --fp8-format hybrid --mamba-num-groups 1 --mamba-num-heads 10 --mamba-head-dim 8 "
            "--mamba-state-dim 8",
            "--mamba-num-heads 10 gives the projections of a Mamba-2 layer 93 rows and 40 columns on each "
            "tensor-parallel rank, but --fp8-format hybrid needs a multiple of 16; use --mamba-num-heads 16",
        ),
    ],
)
def test_heads_are_sharded_evenly(words: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_arguments([*BASE.split(), *words.split(), "--tensor-model-parallel-size", "2"], 2)


SHARED = "--seq-length 24 --context-parallel-size"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{FOUR} --linear-num-key-heads 2 --linear-num-value-heads 6 {SHARED} 4",
            "--linear-num-value-heads 6 with --linear-num-key-heads 2: the 6 heads of a tensor-parallel rank, in 2 "
            "groups, cannot be divided among --context-parallel-size 4 ranks; context-parallel sizes that work: 1, 2, "
            "3, 6; or use --recurrent-cp-comm-type all_gather",
        ),
        (
            f"{MIXED} --mamba-head-dim 8 --mamba-num-groups 2 {SHARED} 3",
            "--mamba-num-heads 8 with --mamba-num-groups 2: the 8 heads of a tensor-parallel rank, in 2 groups",
        ),
        (
            f"{MIXED} --mamba-num-heads 8 {SHARED} 2 --cp-comm-type a2a p2p p2p all_gather",
            "layer 4 (Mamba-2) has --recurrent-cp-comm-type a2a, and not all_gather; use a2a for it",
        ),
        (
            f"--hybrid-override-pattern M-M- --mamba-num-heads 8 {SHARED} 2 --cp-comm-type all_gather",
            "--cp-comm-type all_gather has no effect: the model has no attention layer, and recurrent layers have "
            "--recurrent-cp-comm-type a2a; omit it",
        ),
        (
            f"{MIXED} --recurrent-cp-comm-type all_gather {SHARED} 2 --cp-comm-type a2a p2p p2p all_gather",
            "layer 1 (Mamba-2) has --recurrent-cp-comm-type all_gather, and not a2a; use all_gather for it",
        ),
        (
            f"--recurrent-cp-comm-type all_gather {SHARED} 2",
            "--recurrent-cp-comm-type all_gather has no effect: the model has no recurrent layer; omit it",
        ),
        (
            f"{MIXED} --mamba-num-groups 1 {SHARED} 2 --tensor-model-parallel-size 2",
            "--mamba-num-groups 1 is below --tensor-model-parallel-size 2, which is not supported with "
            "--context-parallel-size 2 and --recurrent-cp-comm-type a2a; use --recurrent-cp-comm-type all_gather, or",
        ),
    ],
)
def test_context_parallel_ranks_share_heads(words: str, message: str) -> None:
    size = int(words.split("--context-parallel-size ")[1].split()[0]) * (2 if "--tensor-model" in words else 1)
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*BASE.split(), *words.split()], size)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_each_layer_may_have_its_communication_type() -> None:
    words = f"{MIXED} --mamba-num-heads 8 {SHARED} 8 --seq-length 32 --cp-comm-type a2a p2p p2p a2a"
    # Eight ranks cannot share the four heads of the attention layer, which has a ring.
    model = resolve_arguments([*BASE.split(), *words.split(), "--max-position-embeddings", "32"], 8).config.model
    assert model.attention_exchanges == {"p2p"}
    passed = words.replace(" a2a", " all_gather") + " --recurrent-cp-comm-type all_gather --mamba-num-heads 4"
    resolve_arguments([*BASE.split(), *passed.split(), "--mamba-num-groups", "4", "--max-position-embeddings", "32"], 8)


def test_symbols_and_names_are_the_same_pattern() -> None:
    symbols = parse_hybrid_pattern("M-M-*EGKP")
    names = "[mamba, mlp]*2 + [attention, moe, gated_delta_net, kimi_delta_attention, attention_and_mamba]"
    assert symbols == parse_hybrid_pattern(names)
    assert symbols[:2] == (LayerParts("mamba", None), LayerParts(None, "mlp"))
    assert symbols[4:] == (SYMBOLS["*"], SYMBOLS["E"], SYMBOLS["G"], SYMBOLS["K"], SYMBOLS["P"])


@pytest.mark.parametrize("pattern", ["-M*-", "--M*", "----"])
def test_a_pattern_may_begin_with_an_mlp(pattern: str) -> None:
    words = [*BASE.split(), "--mamba-num-groups", "1"] if "M" in pattern else BASE.split()
    for given in (("--hybrid-override-pattern", pattern), (f"--hybrid-override-pattern={pattern}",)):
        assert resolve_arguments([*words, *given], 1).config.model.hybrid.hybrid_override_pattern == pattern
    with pytest.raises(ConfigurationError, match="a value is missing; pass --hybrid-override-pattern PATTERN"):
        resolve_arguments([*words, "--hybrid-override-pattern", "--bf16"], 1)


def test_layers_and_experts_follow_the_flags() -> None:
    words = f"{FOUR} --num-experts 8 --moe-layer-freq 2 --num-layers 5 --mtp-num-layers 1 --no-position-embedding"
    model = resolve_arguments([*BASE.split(), *words.split()], 1).config.model
    linear, full = "gated_delta_net", "attention"
    assert [each.mixer for each in model.layer_parts] == [linear, linear, linear, full, linear]
    assert [each.feed_forward for each in model.layer_parts] == ["moe", "mlp", "moe", "mlp", "moe"]
    pattern = "--hybrid-override-pattern ME*G --num-experts 8 --mamba-num-groups 1"
    model = resolve_arguments([*BASE.split(), *pattern.split()], 1).config.model
    assert model.moe_layers == (False, True, False, False)
    assert model.output_init_method_std == pytest.approx(0.02 / 2)
    model = with_fields(model, mtp_num_layers=1)
    assert (model.kind_of(4), model.parts_of(4), model.has_experts(4)) == (2, ("attention", "moe"), True)
    parts = [model.layer_forward_flops(number, 16) for number in (1, 2, 4)]
    assert parts[2] == (parts[0][0] + parts[1][0] + 2 * 16 * 2 * model.hidden_size**2, parts[1][1])


def test_the_work_of_each_part_is_counted() -> None:
    """By hand: multiply-adds per token, x 2 x 24 tokens."""
    flags = (
        "--num-layers 5 --hybrid-override-pattern MG-*K --mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-groups 2"
    )
    flags += " --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
    model = resolve_arguments([*BASE.split(), *flags.split()], 1).config.model
    mamba, delta, mlp, attention, kimi = (model.layer_forward_flops(number, 24) for number in range(5))
    assert mamba == (48 * (32 * (2 * 64 + 2 * 16 + 4) + 64 * 32), 48 * 3.5 * 64 * 8)
    assert delta == (48 * (32 * (2 * 16 + 2 * 32 + 2 * 4) + 32 * 32), 48 * (4 * 64 + 4 * 4 * 8 * 8))
    low_rank = 8 * (2 * 32 + 16 + 32)
    assert kimi == (48 * (32 * (2 * 16 + 32 + 4) + low_rank + 32 * 32), delta[1])
    assert mlp == (48 * 2 * 32 * 40, 0)
    assert attention == (48 * 4 * 32 * 32, 48 * 2 * 32 * 24 / 2)
    both = resolve_arguments([*BASE.split(), *flags.replace("MG-*", "PG-*").split()], 1).config.model
    assert both.layer_forward_flops(0, 24) == (mamba[0] + attention[0], mamba[1] + attention[1])
    gated = resolve_arguments([*BASE.split(), "--attention-output-gate"], 1).config.model
    assert gated.layer_forward_flops(0, 24)[0] == 48 * (5 * 32 * 32 + 2 * 32 * 40)


def test_flags_that_a_checkpoint_sets_for_layers_that_are_absent_are_accepted() -> None:
    words = "--hybrid-override-pattern M-M- --mamba-num-groups 1 --no-position-embedding"
    config = resolve_arguments([*BASE.split(), *words.split()], 1).config
    config = dataclasses.replace(config, model=with_fields(config.model, softmax_scale=2.0, rotary_percent=0.5))
    assert list(flags_of_absent_layers(config, ())) == []
    assert list(flags_of_absent_layers(config, ("rotary_percent",))) == [
        "--rotary-percent 0.5 has no effect: the model has no attention layer; omit it"
    ]


def test_kinds_of_recurrent_layers_have_names_and_symbols_of_their_own_and_read_flags() -> None:
    # Attention, attention and Mamba-2, MLP and experts.
    assert len(SYMBOLS) == len(NAMES) == len(RECURRENT_KINDS) + 4
    assert len({kind.title for kind in RECURRENT_KINDS.values()}) == len(RECURRENT_KINDS)
    names = {spec.name for spec in field_specs(HybridConfig)}
    for name, kind in RECURRENT_KINDS.items():
        assert SYMBOLS[kind.symbol] == LayerParts(name, None)
        assert set(kind.unread) <= names
        read = {field for field in names if kind.reads(field)}
        assert kind.heads(HybridConfig(), 64).field in read
