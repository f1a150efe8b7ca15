"""Checks of models: experts, latent attention, further tokens, sinks and adapters; what works is said in one line."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.verification.cells import BASE_FLAGS
from tests.unit.config.command_lines import MINIMAL

BASE = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --mock-data --ffn-hidden-size 40
    --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0
"""
EIGHT = "--num-experts 8"
FLOAT8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
WRONG = [
    (
        "--num-experts 6 --expert-model-parallel-size 4",
        "not divisible by --expert-model-parallel-size 4; expert-parallel sizes that work: 1, 2",
    ),
    (f"{EIGHT} --moe-router-topk 9", "--moe-router-topk 9 is greater than --num-experts 8; values from 1 to 8 work"),
    (f"{EIGHT} --moe-router-topk 1", "add --moe-router-pre-softmax"),
    (f"{EIGHT} --moe-router-num-groups 3 --moe-router-group-topk 1", "numbers of groups that work: 1, 2, 4, 8"),
    (f"{EIGHT} --moe-router-num-groups 2 --moe-router-group-topk 4", "values from 1 to 2 work"),
    (
        f"{EIGHT} --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 1",
        "numbers of groups that work: 2, 3",
    ),
    (
        f"{EIGHT} --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 3",
        "numbers of groups that work: 1, 2",
    ),
    (
        f"{EIGHT} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 3",
        "--moe-router-group-score-topk 3 is greater than 2, the number of experts per group; values from 1 to 2 work",
    ),
    (f"{EIGHT} --moe-router-num-groups 4", "--moe-router-num-groups 4 has no effect without --moe-router-group-topk N"),
    ("--num-experts 9 --expert-model-parallel-size 3", "expert(3) x expert-tensor(1) = 3; change"),
    ("--num-experts 6 --expert-model-parallel-size 3", "expert-parallel sizes that work: 1, 2)"),
    (f"{EIGHT} --expert-tensor-parallel-size 16", "expert-tensor-parallel sizes that work: 1, 2, 4, 8"),
    (f"{EIGHT} --expert-tensor-parallel-size 8 --moe-ffn-hidden-size 12", "sizes that work: 1, 2, 3, 4, 6, 12"),
    (f"{EIGHT} --moe-expert-capacity-factor 1.0", "use --moe-token-dispatcher-type alltoall"),
    (f"{EIGHT} --moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0.0: a value greater than 0 is expected"),
    (f"{EIGHT} --moe-pad-expert-input-to-capacity", "has no effect without --moe-expert-capacity-factor X; add it"),
    (f"{EIGHT} --moe-layer-freq [0,1]", "use a list of 4"),
    (f"{EIGHT} --moe-layer-freq [0]*4", "gives experts to none of the 4 layers"),
    (f"{EIGHT} --moe-layer-freq __import__('os')", "--moe-layer-freq __import__('os'): a number or a list"),
    (f"{EIGHT} --moe-router-load-balancing-type aux_loss none", "use each type at most once, and none only by itself"),
    (f"{EIGHT} --moe-router-load-balancing-type sinkhorn aux_loss", "at most once, and sinkhorn only by itself"),
    (
        f"{EIGHT} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        "sinkhorn does not support --moe-aux-loss-coeff 0.1; omit it, or use aux_loss",
    ),
    (
        f"{EIGHT} --moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax",
        "sinkhorn does not support --moe-router-pre-softmax; omit it, or use aux_loss",
    ),
    (
        f"{EIGHT} --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1",
        "sinkhorn does not support --moe-expert-capacity-factor 1.0; omit it, or use aux_loss",
    ),
    (f"{EIGHT} --moe-aux-loss-coeff 1 2", "1 numbers are expected"),
    (f"{EIGHT} --moe-aux-loss-coeff -1", "values of 0 or more are expected"),
    (
        f"{EIGHT} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        "use aux_loss",
    ),
    (
        f"{EIGHT} --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap",
        "cannot be overlapped by --moe-shared-expert-overlap; use --moe-token-dispatcher-type alltoall",
    ),
    (
        f"{EIGHT} --lora-rank 2 --load somewhere --finetune --lora-dropout 0.1",
        "--lora-dropout 0.1 is not supported for LoRA of experts (linear_fc1 linear_fc2); use --lora-dropout 0, or",
    ),
    (
        f"{EIGHT} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --lora-rank 2 --load somewhere "
        "--finetune --lora-target-modules linear_qkv",
        "would change the expert bias; use --moe-router-bias-update-rate 0",
    ),
    (f"{EIGHT} {FLOAT8} --moe-ffn-hidden-size 24", "a multiple of 16; use 32"),
    (f"{EIGHT} {FLOAT8} --moe-shared-expert-intermediate-size 40", "40 on each tensor-parallel rank, but FP8 needs"),
    (
        f"{EIGHT} --save somewhere --ckpt-format torch --expert-tensor-parallel-size 2",
        "--ckpt-format torch does not support this combination of --expert-tensor-parallel-size 2, "
        "--tensor-model-parallel-size 1, --expert-model-parallel-size 1 and --num-query-groups 4; use --ckpt-format "
        "torch_dist or safetensors",
    ),
    (f"{EIGHT} --cpu-offloading --cpu-offloading-num-layers 1", "--cpu-offloading is not supported for MoE layers"),
    ("--recompute-granularity selective --recompute-modules moe", "has no effect without --num-experts"),
    ("--recompute-granularity selective --recompute-modules moe_act", "moe_act has no effect without --num-experts"),
    (
        f"{EIGHT} --recompute-granularity selective --recompute-modules shared_experts",
        "has no effect without --moe-shared-expert-intermediate-size",
    ),
    (
        f"{EIGHT} --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap --moe-token-dispatcher-type "
        "alltoall --recompute-granularity selective --recompute-modules shared_experts",
        "exclude each other",
    ),
    (
        "--position-embedding-type rope --position-embedding-offset 2",
        "has no effect with --position-embedding-type rope",
    ),
    ("--position-embedding-type sinusoidal --mtp-num-layers 1", "does not support learned or sinusoidal position"),
    ("--position-embedding-type alibi --softmax-type learnable", "alibi is not supported with --softmax-type: biases"),
    ("--position-embedding-type alibi --attn-logit-softcapping 9", "is not supported with --attn-logit-softcapping"),
    ("--moe-router-topk 4", "--moe-router-topk 4 has no effect without --num-experts N; add it"),
    ("--expert-model-parallel-size 2", "has no effect without --num-experts N; add it"),
    (f"{EIGHT} --moe-input-jitter-eps 0.1", "is not supported yet; omit it: experts are built without it"),
]


@pytest.mark.parametrize(("words", "expected"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_choice_is_refused_in_one_line(words: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        resolve_arguments([*BASE.split(), *words.split()], 8, needs_files=False)
    (problem,) = [problem for problem in refused.value.problems if expected in problem]
    assert "\n" not in problem


def test_no_flag_is_blamed_that_was_not_given() -> None:
    with pytest.raises(ConfigurationError) as refused:
        resolve_arguments([*BASE.split(), "--moe-layer-recompute"], 8, needs_files=False)
    assert refused.value.problems == ("--moe-layer-recompute has no effect without --num-experts N; add it",)


def test_experts_of_a_token_need_not_be_as_many_in_each_group() -> None:
    words = f"{EIGHT} --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2"
    config = resolve_arguments([*BASE.split(), *words.split()], 8, needs_files=False).config
    assert config.model.moe.moe_router_topk == 3


def test_experts_spread_over_data_context_and_tensor_ranks() -> None:
    words = f"{EIGHT} --tensor-model-parallel-size 2 --context-parallel-size 2 --expert-model-parallel-size 8"
    config = resolve_arguments([*BASE.split(), *words.split(), "--expert-tensor-parallel-size", "1"], 8).config
    sizes = config.parallel_sizes
    assert (sizes.dp, sizes.ep, sizes.expert_tp, sizes.num_expert_replicas) == (2, 8, 1, 1)
    assert sizes.record()["expert_model_parallel_size"] == 8


def notes_of(flags: str) -> list[str]:
    """Return the notes on flags of a model of experts that name DeepEP or HybridEP."""
    given = resolve_arguments([*BASE.split(), *EIGHT.split(), *flags.split()], 8)
    return [note for note in given.notes if "deepep" in note.lower() or "HybridEP" in note]


def test_deepep_is_announced_when_the_model_is_built_and_hybridep_is_not_used() -> None:
    flex = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"
    assert notes_of(f"{flex} deepep --moe-deepep-num-sms 24") == []
    instead = "HybridEP is not used; tokens are exchanged with alltoall, with the same results"
    assert notes_of(f"{flex} hybridep --moe-deepep-num-sms 24 --moe-hybridep-num-sms 8") == [
        "--moe-hybridep-num-sms 8 has no effect: HybridEP is not used",
        f"--moe-flex-dispatcher-backend hybridep: {instead}",
        "--moe-deepep-num-sms 24 has no effect with --moe-flex-dispatcher-backend hybridep",
    ]
    without = "has no effect without --moe-token-dispatcher-type flex"
    given = "--moe-token-dispatcher-type alltoall --moe-enable-deepep --moe-flex-dispatcher-num-sms 24"
    assert notes_of(given) == [
        "--moe-enable-deepep has no effect: --moe-token-dispatcher-type flex uses DeepEP without it",
        f"--moe-deepep-num-sms 24 {without}",
    ]


def test_deepep_has_an_even_number_of_multiprocessors() -> None:
    with pytest.raises(ConfigurationError, match="--moe-deepep-num-sms 21: an even number is expected; use 22"):
        notes_of("--moe-token-dispatcher-type flex --moe-deepep-num-sms 21")


def test_routing_at_random_is_announced() -> None:
    random = resolve_arguments([*BASE.split(), *EIGHT.split(), "--moe-router-force-load-balancing"], 8)
    assert any("the router does not learn" in note for note in random.notes)


LATENT = "--multi-latent-attention --position-embedding-type rope"
FURTHER = "--mtp-num-layers 1 --position-embedding-type rope"


def problems_of(flags: str) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *flags.split()], 1)
    return caught.value.problems


def test_models_of_both_are_taken() -> None:
    model = resolve_arguments([*MINIMAL, *f"{LATENT} {FURTHER}".split()], 1).config.model
    assert model.mla.multi_latent_attention
    assert model.mtp.mtp_depth == 1


def test_the_width_of_other_heads_is_no_matter() -> None:
    words = f"{LATENT} --hidden-size 30".split()
    assert resolve_arguments([*MINIMAL, *words], 1).config.model.kv_channels % 2 == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            f"{LATENT} --group-query-attention --num-query-groups 2",
            "but --num-query-groups 2 shares them; omit --num-query-groups",
        ),
        ("--multi-latent-attention", "use --position-embedding-type rope"),
        (f"{LATENT} --qk-pos-emb-head-dim 7", "use 8"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "without --multi-latent-attention"),
        (f"{LATENT} --rotary-percent 0.5", "omit --rotary-percent"),
        (f"{LATENT} --rotary-interleaved", "omit --rotary-interleaved"),
        (f"{LATENT} --disable-qkv-bias", "omit --disable-qkv-bias"),
        (f"{LATENT} --lora-rank 2", "omit --lora-rank"),
        (f"{LATENT} --cuda-graph-impl local", "use --cuda-graph-impl none"),
        (
            f"{LATENT} --no-yarn-correction-range-round-to-int --save somewhere --ckpt-format torch",
            "--ckpt-format torch cannot store a model with --no-yarn-correction-range-round-to-int",
        ),
        (f"{LATENT} --attention-temperature-beta 0.1", "--attention-temperature-beta"),
        ("--attention-temperature-beta 0.1 --position-embedding-type rope", "add --rope-type yarn"),
        (
            "--attention-temperature-beta 0.1 --rope-type yarn --position-embedding-type rope --save somewhere "
            "--ckpt-format torch",
            "--ckpt-format torch cannot store a model with --attention-temperature-beta 0.1",
        ),
        (
            f"{LATENT} --qk-layernorm --latent-norm-epsilon 1e-6 --save somewhere --ckpt-format torch",
            "--ckpt-format torch cannot store a model with --latent-norm-epsilon",
        ),
        ("--rope-type yarn", "use --position-embedding-type rope, or omit --rope-type"),
        ("--rope-type yarn --position-embedding-type rope --use-rope-scaling", "--use-rope-scaling both scale rotary"),
        ("--mtp-num-layers 1", "use --position-embedding-type rope or --no-position-embedding"),
        (f"{FURTHER} --mtp-num-layers 1000", "predicts tokens beyond the end of --seq-length"),
        (f"{FURTHER} --lora-rank 2", "omit --lora-rank or --mtp-num-layers"),
        (f"{FURTHER} --cuda-graph-impl local", "use --cuda-graph-impl none"),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(flags: str, words: str) -> None:
    assert any(words in problem for problem in problems_of(flags)), problems_of(flags)


def test_what_rotary_positions_are_anyway_has_a_place_in_megatrons_files() -> None:
    saved = "--save somewhere --ckpt-format torch --position-embedding-type rope --rope-type"
    assert resolve_arguments([*MINIMAL, *f"{saved} rope".split()], 1).config.model.rope.rope_type == "rope"


ROTARY = ("--position-embedding-type", "rope")


def resolve(*flags: str) -> RunConfig:
    return resolve_arguments([*BASE_FLAGS, *flags], 1, needs_files=False).config


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("2", (False, True, False, True)),
        ("1", (True, True, True, True)),
        ("5", (False, False, False, False)),
        ("[1,0,0,1]", (True, False, False, True)),
        ("([0]*3+[1])*1", (False, False, False, True)),
    ],
)
def test_a_number_skips_every_nth_layer_and_a_list_those_with_a_1(pattern: str, expected: tuple[bool, ...]) -> None:
    assert resolve(*ROTARY, "--no-rope-freq", pattern).model.layers_without_rotary == expected


def test_a_number_above_the_layers_is_said_to_count_for_nothing() -> None:
    flags = (*BASE_FLAGS, *ROTARY, "--no-rope-freq")
    (note,) = resolve_arguments([*flags, "5"], 1, needs_files=False).notes
    assert note.startswith("--no-rope-freq 5 has no effect on fewer layers than its value")
    assert resolve_arguments([*flags, "4"], 1, needs_files=False).notes == ()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((*ROTARY, "--no-rope-freq", "[0,1]"), "the list has 2 entries, but the model has 4 layers; use a list of 4"),
        ((*ROTARY, "--no-rope-freq", "0"), "--no-rope-freq 0: a number greater than 0 is expected"),
        ((*ROTARY, "--no-rope-freq", "[0,1,2,0]"), "a list of 1 and 0 is expected"),
        (("--no-rope-freq", "2"), "no effect with --position-embedding-type learned_absolute"),
        ((*ROTARY, "--multi-latent-attention", "--no-rope-freq", "2"), "omit --no-rope-freq"),
        (("--softmax-type", "two"), "vanilla"),
        ((*ROTARY, "--no-yarn-correction-range-round-to-int"), "has no effect without --rope-type yarn"),
    ],
)
def test_what_cannot_be_is_answered_in_a_line(flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(*flags)
    assert [line for line in caught.value.problems if problem in line], caught.value.problems


PIPELINE = "--num-layers 4 --lora-rank 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"


def test_a_stage_without_layers_is_refused() -> None:
    assert resolve_arguments([*MINIMAL, *PIPELINE.split(), "Ettt|tL"], 2).config.model.lora_rank == 2
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *PIPELINE.split(), "Etttt|L"], 2)
    assert caught.value.problems == (
        "--lora-rank trains adapters of layers, but a pipeline stage has no layer (Etttt|L); assign a layer to each "
        "stage",
    )


MTP = "--num-layers 4 --position-embedding-type rope --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"


def test_the_modules_of_a_layout_are_those_of_the_model() -> None:
    parsed = resolve_arguments([*MINIMAL, *MTP.split(), "Ettt|tmL", "--mtp-num-layers", "1"], 2)
    assert not [note for note in parsed.notes if "MTP" in note]
    parsed = resolve_arguments([*MINIMAL, *MTP.split(), "Ett|t|t|mL", "--mtp-num-layers", "1"], 2)
    assert not [note for note in parsed.notes if "MTP" in note]
    parsed = resolve_arguments([*MINIMAL, *MTP.split(), "Ett|tt|m|L", "--mtp-num-layers", "1"], 2)
    assert (
        "--pipeline-model-parallel-layout Ett|tt|m|L: the MTP modules (m) run on the stage of the loss (L), and not on "
        "a stage before it; results are the same"
    ) in parsed.notes
    given = "--pipeline-model-parallel-layout 'Ettt|tmL' has 1 m (MTP modules)"
    for more, rest in (
        ("--mtp-num-layers 2", "--mtp-num-layers is 2; write m*2, or omit m"),
        ("", "the model has none; add --mtp-num-layers 1"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            resolve_arguments([*MINIMAL, *MTP.split(), "Ettt|tmL", *more.split()], 2)
        assert caught.value.problems == (f"{given}, and {rest}",)
