"""Each wrong configuration makes exactly its one line, and limits that are never reached say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.checks.run_checks import find_problems
from megatron.core.errors import ConfigurationError
from tests.unit.config.command_lines import MINIMAL, TOKENIZER, write_data_set


def problems_of(argv: list[str], world_size: int = 1) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments(argv, world_size)
    return caught.value.problems


def without(flag: str, count: int = 2) -> list[str]:
    start = MINIMAL.index(flag)
    return [*MINIMAL[:start], *MINIMAL[start + count :]]


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
WRONG = [
    # added flags, world size, the flag that the line is about, what would work
    ("--num-attention-heads 8 --tensor-model-parallel-size 4", 6, "--tensor-model-parallel-size", ()),
    ("--tensor-model-parallel-size 4", 4, "--num-attention-heads", ("1, 2, 3, 6",)),
    (
        "--tensor-model-parallel-size 2 --num-query-groups 3 --group-query-attention",
        2,
        "--num-query-groups",
        ("1, 3 and multiples of 3",),
    ),
    ("--tensor-model-parallel-size 2 --ffn-hidden-size 91", 2, "--ffn-hidden-size", ("1, 7, 13",)),
    ("--tensor-model-parallel-size 2 --sequence-parallel --seq-length 41", 2, "--seq-length", ("42",)),
    ("--context-parallel-size 2 --seq-length 38", 2, "--seq-length", ("40", "1, 19")),
    ("--context-parallel-size 2 --tensor-model-parallel-size 3 --sequence-parallel", 6, "--seq-length", ("48", "none")),
    ("--context-parallel-size 4 --cp-comm-type a2a p2p", 4, "--cp-comm-type", ("1, 2, 3, 6",)),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --num-query-groups 2 --group-query-attention",
        4,
        "--cp-comm-type",
        ("1, 2, 3, 6",),
    ),
    ("--cp-comm-type p2p p2p p2p", 1, "--cp-comm-type", ()),
    ("--cp-comm-type a2a+p2p --context-parallel-size 4", 4, "--cp-comm-type", ("1 4, 2 2, 4 1",)),
    (
        "--cp-comm-type a2a+p2p --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 4",
        4,
        "--cp-comm-type",
        ("1 4, 2 2, 4 1",),
    ),
    (
        "--cp-comm-type a2a+p2p --context-parallel-size 4 --hierarchical-context-parallel-sizes 4 1",
        4,
        "--cp-comm-type",
        ("1, 2, 3, 6",),
    ),
    ("--cp-comm-type ring", 1, "--cp-comm-type", ("p2p, all_gather, a2a, a2a+p2p",)),
    ("--tensor-model-parallel-size 0", 1, "--tensor-model-parallel-size", ()),
    ("--hidden-size 50", 1, "--hidden-size", ("1, 2, 5, 10, 25, 50 (or set --kv-channels)",)),
    ("--num-query-groups 4 --group-query-attention", 1, "--num-attention-heads", ("1, 2, 3, 6",)),
    ("--max-position-embeddings 32", 1, "--seq-length", ()),
    ("--seq-length 0", 1, "--seq-length", ()),
    ("--ckpt-format torch --use-parallel-residual", 1, "--ckpt-format", ("--ckpt-format safetensors",)),
    ("--qk-layernorm --qk-layernorm-across-heads", 1, "--qk-layernorm-across-heads", ()),
    ("--window-size 128", 1, "--window-size", ()),
    ("--window-size 128,3", 1, "--window-size", ()),
    ("--window-attn-skip-freq 2", 1, "--window-attn-skip-freq", ()),
    ("--window-size 3,0 --window-attn-skip-freq 0", 1, "--window-attn-skip-freq", ()),
    ("--window-size 3,0 --window-attn-skip-freq [1]*3", 1, "--window-attn-skip-freq", ()),
    ("--window-size 3,0 --window-attn-skip-freq len([1])", 1, "--window-attn-skip-freq", ()),
    ("--position-embedding-type rope --rotary-percent 1.5", 1, "--rotary-percent", ()),
    ("--position-embedding-type rope --rotary-percent .4", 1, "--kv-channels", ()),
    ("--use-rope-scaling", 1, "--use-rope-scaling", ()),
    ("--swiglu --squared-relu", 1, "--swiglu", ()),
    ("--fp16 --bf16", 1, "--fp16", ()),
    ("--hidden-size 18 --swiglu", 1, "--hidden-size", ()),
    ("--hidden-size 18 --geglu", 1, "--hidden-size", ()),
    ("--recompute-granularity full", 1, "--recompute-granularity", ()),
    ("--recompute-granularity full --recompute-method block", 1, "--recompute-method", ()),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        1,
        "--recompute-num-layers",
        ("values from 1 to 2",),
    ),
    ("--recompute-activations --recompute-method uniform", 1, "--recompute-method", ()),
    ("--recompute-activations --recompute-granularity full", 1, "--recompute-activations", ()),
    ("--num-experts 2 --moe-layer-recompute --recompute-granularity full", 1, "--moe-layer-recompute", ()),
    ("--recompute-modules mlp layernorm", 1, "--recompute-modules", ()),
    (
        "--recompute-modules mlp --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        1,
        "--recompute-modules",
        ("--recompute-granularity selective",),
    ),
    (
        "--recompute-activations --recompute-modules layernorm mlp --norm-placement post",
        1,
        "--recompute-modules",
        ("--recompute-modules mlp",),
    ),
    (
        "--recompute-activations --recompute-modules layernorm --apply-residual-connection-post-layernorm",
        1,
        "--recompute-modules",
        ("--recompute-modules core",),
    ),
    ("--quick-geglu --swiglu", 1, "--quick-geglu", ()),
    ("--glu-linear-offset 1", 1, "--glu-linear-offset", ()),
    ("--gemm-activation-fusion --swiglu", 1, "--gemm-activation-fusion", ("swiglu", "GELU and --squared-relu")),
    ("--gemm-activation-fusion --lora-rank 2", 1, "--gemm-activation-fusion", ("--lora-rank 2",)),
    ("--gemm-activation-fusion --fp8-format hybrid --bf16", 1, "--gemm-activation-fusion", ("--fp8-format hybrid",)),
    ("--activation-func-clamp-value 7", 1, "--activation-func-clamp-value", ()),
    ("--swiglu --activation-func-clamp-value 0", 1, "--activation-func-clamp-value", ()),
    (
        "--apply-residual-connection-post-layernorm --norm-placement sandwich",
        1,
        "--apply-residual-connection-post-layernorm",
        (),
    ),
    (
        "--group-query-attention --num-query-groups 2 --window-size 4,0 --window-attn-skip-freq 2 "
        "--global-num-query-groups 4",
        1,
        "--num-attention-heads",
        ("1, 2, 3, 6",),
    ),
    ("--window-size 4,0 --global-kv-channels 10", 1, "--global-kv-channels", ("--window-attn-skip-freq",)),
    ("--window-size 4,0 --attention-k-eq-v", 1, "--attention-k-eq-v", ()),
    ("--global-kv-channels 10", 1, "--global-kv-channels", ()),
    ("--rope-type proportional", 1, "--rope-type", ("--position-embedding-type rope",)),
    (
        "--position-embedding-type rope --rope-type proportional --rotary-ntk-alpha 4",
        1,
        "--rope-type",
        (),
    ),
    ("--shared-parallel-norm --use-parallel-residual --norm-placement post", 1, "--shared-parallel-norm", ()),
    ("--norm-parameters none --apply-layernorm-1p", 1, "--apply-layernorm-1p", ()),
    ("--qk-layernorm --qk-layernorm-after-rope", 1, "--qk-layernorm-after-rope", ("--position-embedding-type rope",)),
    (
        "--position-embedding-type rope --kv-channels 2 --rotary-ntk-alpha 4",
        1,
        "--rotary-ntk-alpha",
        ("--kv-channels",),
    ),
    (
        "--num-experts 4 --moe-router-score-function sparsemixer --moe-router-pre-softmax",
        1,
        "--moe-router-score-function",
        ("omit --moe-router-pre-softmax",),
    ),
    (
        "--num-experts 4 --moe-router-score-function sparsemixer --moe-router-enable-expert-bias",
        1,
        "--moe-router-score-function",
        ("omit --moe-router-enable-expert-bias",),
    ),
    ("--num-kv-shared-layers 2", 1, "--num-kv-shared-layers", ("use at most 1",)),
    (
        "--num-kv-shared-layers 1 --window-size 4,0 --window-attn-skip-freq [1,0]",
        1,
        "--num-kv-shared-layers",
        ("none of the first 1 layers has the window", "use a smaller number"),
    ),
    ("--num-kv-shared-layers 1 --qk-clip", 1, "--num-kv-shared-layers", ()),
    ("--num-kv-shared-layers 1 --lora-rank 4", 1, "--num-kv-shared-layers", ()),
    (
        "--num-kv-shared-layers 1 --cuda-graph-impl local --attention-dropout 0",
        1,
        "--num-kv-shared-layers",
        ("--cuda-graph-impl none",),
    ),
    ("--use-double-wide-mlp", 1, "--use-double-wide-mlp", ("--num-kv-shared-layers",)),
    (
        "--use-double-wide-mlp --num-kv-shared-layers 1 --num-experts 2",
        1,
        "--use-double-wide-mlp",
        ("all of the last 1 layers have experts",),
    ),
    ("--hidden-size-per-layer-input 4", 1, "--hidden-size-per-layer-input", ("gelu_tanh", "--swiglu")),
    ("--hidden-size-per-layer-input 4 --swiglu --lora-rank 4", 1, "--hidden-size-per-layer-input", ("--lora-rank",)),
    (
        "--hidden-size-per-layer-input 4 --swiglu --cuda-graph-impl local --attention-dropout 0",
        1,
        "--hidden-size-per-layer-input",
        ("--cuda-graph-impl none",),
    ),
    ("--xielu --num-experts 2", 1, "--xielu", ("--num-experts 2",)),
    ("--norm-parameters weight --transformer-impl transformer_engine", 1, "--norm-parameters", ()),
    (
        "--norm-parameters none --normalization RMSNorm --qk-layernorm --qk-layernorm-across-heads",
        1,
        "--qk-layernorm-across-heads",
        (),
    ),
    (
        "--apply-residual-connection-post-layernorm --use-parallel-residual",
        1,
        "--apply-residual-connection-post-layernorm",
        (),
    ),
    (
        "--tensor-model-parallel-size 2 --recompute-activations --distribute-saved-activations",
        2,
        "--distribute-saved-activations",
        (),
    ),
    (f"{FULL} --distribute-saved-activations", 1, "--distribute-saved-activations", ()),
    (
        f"{FULL} --distribute-saved-activations --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--distribute-saved-activations",
        (),
    ),
    ("--cpu-offloading", 1, "--cpu-offloading", ("values from 1 to 2",)),
    ("--cpu-offloading --cpu-offloading-num-layers 3", 1, "--cpu-offloading-num-layers", ("values from 1 to 2",)),
    ("--cpu-offloading-num-layers 1", 1, "--cpu-offloading-num-layers", ()),
    ("--no-cpu-offloading-activations", 1, "--no-cpu-offloading-activations", ()),
    ("--cpu-offloading-weights", 1, "--cpu-offloading-weights", ()),
    ("--cpu-offloading --cpu-offloading-num-layers 1 --no-cpu-offloading-activations", 1, "--cpu-offloading", ()),
    (
        "--cpu-offloading --cpu-offloading-num-layers 1 --cpu-offloading-weights --use-distributed-optimizer",
        2,
        "--cpu-offloading-weights",
        (),
    ),
    (
        "--cpu-offloading --cpu-offloading-num-layers 1 --cuda-graph-impl local --attention-dropout 0",
        1,
        "--cuda-graph-impl",
        (),
    ),
    (
        f"{FULL} --distribute-saved-activations --tensor-model-parallel-size 2 --cuda-graph-impl local "
        "--attention-dropout 0",
        2,
        "--cuda-graph-impl",
        (),
    ),
    ("--global-batch-size 10", 3, "--global-batch-size", ("6 or 12",)),
    ("--global-batch-size 8 --rampup-batch-size 2 2", 1, "--rampup-batch-size", ()),
    ("--global-batch-size 8 --rampup-batch-size 2 4 9", 1, "--rampup-batch-size", ("2, 6",)),
    ("--global-batch-size 8 --rampup-batch-size 5 3 9", 1, "--rampup-batch-size", ()),
    ("--global-batch-size 8 --rampup-batch-size 12 2 9", 1, "--rampup-batch-size", ()),
    ("--global-batch-size 8 --rampup-batch-size 2 2 0", 1, "--rampup-batch-size", ()),
    ("--train-samples 100", 1, "--train-iters", ()),
    ("--train-iters 0 --train-samples 1", 1, "--train-samples", ()),
    ("--train-iters 0", 1, "--train-iters", ()),
    ("--lr 0", 1, "--lr", ()),
    ("--lr -1", 1, "--lr", ()),
    ("--lr nan", 1, "--lr", ()),
    ("--min-lr 1", 1, "--min-lr", ()),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 3", 1, "--lr-warmup-fraction", ()),
    ("--lr-warmup-iters 10", 1, "--lr-warmup-iters", ()),
    ("--lr-decay-samples 100", 1, "--lr-decay-samples", ()),
    ("--lr-decay-style WSD", 1, "--lr-decay-style", ()),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, "--lr-wsd-decay-iters", ()),
    ("--weight-decay-incr-style linear", 1, "--weight-decay-incr-style", ()),
    ("--start-weight-decay .3", 1, "--start-weight-decay", ()),
    ("--weight-decay-incr-style linear --start-weight-decay .3 --end-weight-decay .2", 1, "--end-weight-decay", ()),
    (
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler --load x",
        1,
        "--override-opt-param-scheduler",
        (),
    ),
    ("--hidden-dropout 1", 1, "--hidden-dropout", ()),
    ("--seed 4294967296", 1, "--seed", ()),
    ("--log-interval=-1", 1, "--log-interval", ()),
    ("--timing-log-level 3", 1, "--timing-log-level", ("0, 1, 2",)),
    ("--empty-unused-memory-level 3", 1, "--empty-unused-memory-level", ("0, 1, 2",)),
    ("--keep-last 2", 1, "--keep-last", ()),
    ("--geglu --ckpt-format torch_dist", 1, "--ckpt-format", ("--ckpt-format safetensors",)),
    ("--geglu --ckpt-format torch", 1, "--ckpt-format", ("--ckpt-format safetensors",)),
    ("--ckpt-step 5", 1, "--ckpt-step", ()),
    ("--finetune", 1, "--finetune", ()),
    ("--manual-gc-interval 3", 1, "--manual-gc-interval", ()),
    ("--split 9,x", 1, "--split", ()),
    ("--split 0,1,1", 1, "--split", ()),
    ("--tokenizer-type TikTokenizer", 1, "--tokenizer-model", ()),
    ("--train-iters 1.5", 1, "--train-iters", ()),
    ("--grad-reduce-in-bf16", 1, "--grad-reduce-in-bf16", ()),
    ("--data-path somewhere", 1, "--data-path", ()),
]


@pytest.mark.parametrize(("flags", "world_size", "flag", "works"), WRONG, ids=[row[0] for row in WRONG])
def test_each_wrong_configuration_makes_one_line(
    flags: str, world_size: int, flag: str, works: tuple[str, ...]
) -> None:
    (problem,) = problems_of([*MINIMAL, *flags.split()], world_size)
    assert "\n" not in problem
    assert re.search(r"--[\w-]+", problem)[0] == flag  # type: ignore[index]
    assert all(each in problem for each in works)


@pytest.mark.parametrize("flag", ["--num-layers", "--hidden-size", "--num-attention-heads"])
def test_a_missing_required_flag_makes_one_line(flag: str) -> None:
    assert problems_of(without(flag)) == (f"{flag} is missing; it has no default",)
    advice = "--use-checkpoint-args takes it from the checkpoint of --load"
    assert problems_of([*without(flag), "--load", "run"]) == (f"{flag} is missing; it has no default; {advice}",)


def test_a_step_is_planned_without_the_length_of_its_run() -> None:
    words = without("--train-iters")
    assert len(problems_of(words)) == 1
    assert resolve_arguments(words, 1, needs_files=False).config.train_samples == 0


def test_the_minimal_command_line_is_right() -> None:
    assert find_problems(resolve_arguments(MINIMAL, 1).config) == []


RIGHT = [
    ("--tensor-model-parallel-size 6 --num-query-groups 3 --group-query-attention", 6),
    ("--tensor-model-parallel-size 2 --num-query-groups 2 --group-query-attention", 4),
    ("--kv-channels 7", 1),
    ("--hidden-size 50 --multi-latent-attention --position-embedding-type rope", 1),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1),
    ("--global-batch-size 8 --rampup-batch-size 2 2 12", 1),
    ("--max-position-embeddings 32 --position-embedding-type rope", 1),
    ("--skip-train --lr 0 --train-iters 0", 1),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style cosine", 1),
    ("--weight-decay-incr-style cosine --start-weight-decay .1 --end-weight-decay .2", 1),
    ("--save-interval 5 --save here --keep-last 3 --keep-every 10", 1),
]


@pytest.mark.parametrize(("flags", "world_size"), RIGHT, ids=[flags for flags, _ in RIGHT])
def test_right_configurations_pass(flags: str, world_size: int) -> None:
    parsed = resolve_arguments([*MINIMAL, *flags.split()], world_size)
    assert parsed.notes == ()


def data_argv(*words: object) -> list[str]:
    return [*(word for word in MINIMAL if word != "--mock-data"), *(str(word) for word in words)]


def test_no_data_at_all() -> None:
    assert problems_of(data_argv()) == (
        "no data is configured; pass --data-path PREFIX, --train-data-path PREFIX, --train-data FILE or --mock-data",
    )


def test_missing_data_files(tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    (problem,) = problems_of(data_argv("--data-path", prefix))
    assert problem == (
        f"--data-path {prefix}: data file {prefix}.idx does not exist; pass the data path without .bin or .idx, as in "
        "my-corpus_text_document"
    )
    write_data_set(prefix)
    (tmp_path / "text.bin").unlink()
    (problem,) = problems_of(data_argv("--data-path", prefix))
    assert f"{prefix}.bin does not exist" in problem


def test_data_files_of_the_wrong_size(tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    for name, size, message in (
        ("text.idx", 20, "but its header alone needs 34"),
        ("text.idx", 2041, "has 2041 bytes, but 100 sequences and 101 document indices need 2042"),
        ("text.bin", 599, "is truncated: it has 599 bytes, but its index describes 600"),
        ("text.bin", 601, "does not belong to its .idx: it has 601 bytes, but its index describes 600"),
    ):
        write_data_set(prefix)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes().ljust(size, b"0")[:size])
        (problem,) = problems_of(data_argv("--data-path", prefix))
        assert message in problem
    write_data_set(prefix)
    (tmp_path / "text.idx").write_bytes(b"\x00" * 2042)
    (problem,) = problems_of(data_argv("--data-path", prefix))
    assert "is not an index file" in problem


def test_a_data_set_without_documents(tmp_path: Path) -> None:
    write_data_set(tmp_path / "text", lengths=())
    (problem,) = problems_of(data_argv("--data-path", tmp_path / "text"))
    assert "the data set contains no documents" in problem


def test_each_missing_data_set_of_a_blend_is_named(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a")
    problems = problems_of(data_argv("--data-path", 0.2, tmp_path / "a", 0.3, tmp_path / "b", 0.5, tmp_path / "c"))
    assert [problem.split(":")[0] for problem in problems] == [
        f"--data-path {tmp_path}/b",
        f"--data-path {tmp_path}/c",
    ]


def test_weights_of_a_blend(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a")
    (problem,) = problems_of(data_argv("--data-path", 0.0, tmp_path / "a"))
    assert "is 0; use a positive weight" in problem
    (problem,) = problems_of(data_argv("--data-path", 0.5, tmp_path / "a", tmp_path / "b"))
    assert "mix entries with and without a weight" in problem


def test_an_empty_validation_set_is_refused_with_a_split_that_works(tmp_path: Path) -> None:
    write_data_set(tmp_path / "text", lengths=(3,) * 8)
    (problem,) = problems_of(data_argv("--data-path", tmp_path / "text", "--split", "969,30,1"))
    assert "of the 8 documents" in problem
    assert "leaves the validation set empty; use --split " in problem
    resolve_arguments(data_argv("--data-path", tmp_path / "text", "--split", "6,1,1"), 1)
    resolve_arguments(data_argv("--data-path", tmp_path / "text", "--eval-iters", 0), 1)


def test_an_empty_test_set_is_accepted_and_left_to_the_data_sets_to_report(tmp_path: Path) -> None:
    write_data_set(tmp_path / "text", lengths=(3,) * 121)
    for split in ("949,50,1", "99,1,0", "1"):
        parsed = resolve_arguments(data_argv("--data-path", tmp_path / "text", "--split", split), 1)
        assert parsed.notes == ()


def test_split_with_data_of_their_own(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a")
    (problem,) = problems_of(data_argv("--train-data-path", tmp_path / "a", "--split", "9,1,0"))
    assert "--split 9,1,0 has no effect if each set has its own data" in problem
    (problem,) = problems_of(data_argv("--valid-data-path", tmp_path / "a"))
    assert "--train-data-path is missing" in problem


def tokenizer_argv(*words: object) -> list[str]:
    return [*(word for word in MINIMAL if word not in TOKENIZER), *(str(word) for word in words)]


def test_missing_tokenizer_files(tmp_path: Path) -> None:
    problems = problems_of(tokenizer_argv())
    assert [problem.split(" is ")[0] for problem in problems] == ["--vocab-file", "--merge-file"]
    merges = tmp_path / "merges.txt"
    merges.write_text("")
    (problem,) = problems_of(tokenizer_argv("--vocab-file", tmp_path / "v.json", "--merge-file", merges))
    assert problem.startswith(f"--vocab-file {tmp_path}/v.json: there is no such file")
    (problem,) = problems_of(tokenizer_argv("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path))
    assert "has no tokenizer.json" in problem
    (problem,) = problems_of(tokenizer_argv("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", tmp_path))
    assert "needs a file" in problem
    (problem,) = problems_of(tokenizer_argv("--tokenizer-type", "TikTokenizer", "--tokenizer-model", tmp_path / "none"))
    assert "no such file or folder" in problem
    (problem,) = problems_of(tokenizer_argv("--tokenizer-type", "NullTokenizer"))
    assert problem.startswith("--vocab-size is missing")


def test_folders_and_files_are_not_confused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for flag in ("--save", "--load", "--tensorboard-dir", "--data-cache-path"):
        assert problems_of([*MINIMAL, flag, str(file)]) == (f"{flag} {file} is a file; pass a folder",)
    (problem,) = problems_of([*MINIMAL, "--metrics-jsonl", str(tmp_path)])
    assert "is a folder; pass a file" in problem


def test_list_files_that_cannot_be_read(tmp_path: Path) -> None:
    problems = problems_of(data_argv("--data-args-path", tmp_path / "none"))
    assert len(problems) == 1
    assert "the file cannot be read" in problems[0]


FIRST_BAD_GRADIENT = (
    "--max-consecutive-skipped-iterations 5 has no effect without --fp16: the first gradient that is not finite ends "
    "the run or follows --spike-policy; --no-check-for-nan-in-loss-and-grad skips it"
)


@pytest.mark.parametrize(
    ("words", "remedy", "note"),
    [
        (
            "--spike-policy stop --max-spikes 3",
            "--spike-policy skip",
            "--max-spikes 3 has no effect with --spike-policy stop: the first spike ends the run",
        ),
        ("--max-consecutive-skipped-iterations 5", "--no-check-for-nan-in-loss-and-grad", FIRST_BAD_GRADIENT),
        ("--max-consecutive-skipped-iterations 5", "--fp16", FIRST_BAD_GRADIENT),
    ],
)
def test_limits_that_are_never_reached_say_so(words: str, remedy: str, note: str) -> None:
    assert resolve_arguments([*MINIMAL, *words.split()], 1).notes == (note,)
    assert resolve_arguments([*MINIMAL, *words.split(), *remedy.split()], 1).notes == ()


RESTART = ("--inprocess-restart",)
COPIES = (*RESTART, "--non-persistent-save-interval", "5")


@pytest.mark.parametrize(
    ("flags", "world_size", "problem"),
    [
        (
            ("--inprocess-hard-timeout", "5"),
            1,
            "--inprocess-hard-timeout 5.0 has no effect without --inprocess-restart",
        ),
        (("--non-persistent-save-interval", "5"), 1, "has no effect without --inprocess-restart"),
        ((*RESTART, "--replication"), 2, "--replication has no effect without --non-persistent-save-interval"),
        ((*COPIES, "--replication-jump", "1"), 2, "--replication-jump 1 has no effect without --replication"),
        ((*COPIES, "--replication"), 1, "with world size 1 each rank would send its copy to itself; omit it"),
        (
            (*COPIES, "--replication", "--replication-jump", "4"),
            4,
            "--replication --replication-jump 4: with world size 4 each rank .* to itself; use a --replication-jump "
            "from 1 to 3",
        ),
        (
            (*COPIES, "--non-persistent-ckpt-type", "global"),
            1,
            "--non-persistent-ckpt-type global is not supported yet",
        ),
        ((*RESTART, "--inprocess-barrier-timeout", "0"), 1, "--inprocess-barrier-timeout"),
    ],
)
def test_what_could_have_no_effect_is_refused(flags: tuple[str, ...], world_size: int, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        resolve_arguments([*MINIMAL, *flags], world_size)


@pytest.mark.parametrize("more", [(), ("--non-persistent-ckpt-type", "local"), ("--replication",)])
def test_copies_are_accepted(more: tuple[str, ...]) -> None:
    parsed = resolve_arguments([*MINIMAL, *COPIES, *more], 2)
    assert parsed.config.restart.non_persistent_save_interval == 5
