"""Wrong choices of experts get one line each, with the values that would work."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError

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
    (f"{EIGHT} --moe-router-num-groups 3 --moe-router-group-topk 1", "groups that work: 1, 2, 4, 8"),
    (f"{EIGHT} --moe-router-num-groups 2 --moe-router-group-topk 4", "values from 1 to 2 work"),
    (f"{EIGHT} --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 1", "groups that work: 2, 3"),
    (f"{EIGHT} --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 3", "groups that work: 1, 2"),
    (f"{EIGHT} --moe-router-num-groups 4", "--moe-router-num-groups 4 has no effect without --moe-router-group-topk N"),
    ("--num-experts 9 --expert-model-parallel-size 3", "expert(3) x expert-tensor(1) = 3; change"),
    ("--num-experts 6 --expert-model-parallel-size 3", "expert-parallel sizes that work: 1, 2)"),
    (f"{EIGHT} --expert-tensor-parallel-size 16", "expert-tensor-parallel sizes that work: 1, 2, 4, 8"),
    (f"{EIGHT} --expert-tensor-parallel-size 8 --moe-ffn-hidden-size 12", "sizes that work: 1, 2, 3, 4, 6, 12"),
    (f"{EIGHT} --moe-expert-capacity-factor 1.0", "use --moe-token-dispatcher-type alltoall"),
    (f"{EIGHT} --moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0.0: a value greater than 0 is expected"),
    (f"{EIGHT} --moe-pad-expert-input-to-capacity", "has no effect without --moe-expert-capacity-factor X; add it"),
    (f"{EIGHT} --moe-router-enable-expert-bias", "add --moe-router-score-function sigmoid"),
    (f"{EIGHT} --moe-layer-freq [0,1]", "a list of 4 works"),
    (f"{EIGHT} --moe-layer-freq [0]*4", "gives no layer of --num-layers 4 experts"),
    (f"{EIGHT} --moe-layer-freq __import__('os')", "--moe-layer-freq __import__('os'): a number or a list"),
    (f"{EIGHT} --moe-router-load-balancing-type aux_loss none", "give each kind once, or none alone"),
    (f"{EIGHT} --moe-router-load-balancing-type sinkhorn", "sinkhorn is not supported yet; possible: aux_loss"),
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
        "--lora-dropout 0.1 is not built for adapters of experts (linear_fc1 linear_fc2); use --lora-dropout 0, or",
    ),
    (
        f"{EIGHT} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --lora-rank 2 --load somewhere "
        "--finetune --lora-target-modules linear_qkv",
        "would move the experts' bias; use --moe-router-bias-update-rate 0",
    ),
    (f"{EIGHT} {FLOAT8} --moe-ffn-hidden-size 24", "a multiple of 16; use 32"),
    (f"{EIGHT} {FLOAT8} --moe-shared-expert-intermediate-size 40", "40 on each tensor-parallel rank, which fp8 needs"),
    (
        f"{EIGHT} --save somewhere --ckpt-format torch --expert-tensor-parallel-size 2",
        "no place for --expert-tensor-parallel-size 2 beside --tensor-model-parallel-size 1, "
        "--expert-model-parallel-size 1 and --num-query-groups 4; use --ckpt-format torch_dist or safetensors",
    ),
    (f"{EIGHT} --cpu-offloading --cpu-offloading-num-layers 1", "--cpu-offloading is not built for layers of experts"),
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
    ("--moe-router-topk 4", "--moe-router-topk 4 has no effect without --num-experts N; add it"),
    ("--expert-model-parallel-size 2", "has no effect without --num-experts N; add it"),
    (f"{EIGHT} --moe-input-jitter-eps 0.1", "is not supported yet; leave it out: experts are built without it"),
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
    assert resolve_arguments([*BASE.split(), *words.split()], 8, needs_files=False).config.model.moe_router_topk == 3


def test_experts_spread_over_data_context_and_tensor_ranks() -> None:
    words = f"{EIGHT} --tensor-model-parallel-size 2 --context-parallel-size 2 --expert-model-parallel-size 8"
    config = resolve_arguments([*BASE.split(), *words.split(), "--expert-tensor-parallel-size", "1"], 8).config
    sizes = config.parallel_sizes
    assert (sizes.dp, sizes.ep, sizes.expert_tp, sizes.num_expert_replicas) == (2, 8, 1, 1)
    assert sizes.record()["expert_model_parallel_size"] == 8


def test_others_kernels_give_way_to_alltoall_and_routing_at_random_is_announced() -> None:
    flex = "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-flex-dispatcher-backend deepep"
    given = resolve_arguments([*BASE.split(), *EIGHT.split(), *flex.split()], 8)
    assert given.config.model.moe_token_dispatcher_type == "alltoall"
    assert [note.split(": ")[0] for note in given.notes if "HybridEP" in note] == [
        "--moe-enable-deepep has no effect",
        "--moe-flex-dispatcher-backend deepep has no effect",
        "--moe-token-dispatcher-type flex",
    ]
    random = resolve_arguments([*BASE.split(), *EIGHT.split(), "--moe-router-force-load-balancing"], 8)
    assert any("the model does not learn its routing" in note for note in random.notes)
