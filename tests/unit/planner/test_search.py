"""The search looks at every layout, drops with a reason or by a bound, and prints a command that training takes."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.cli.plan import main
from megatron.cli.planner_arguments import read_planned_run
from megatron.config.arguments import resolve_arguments
from megatron.config.config_sources import preset_names, preset_words
from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.planner.bounds import Bounds
from megatron.planner.choice import Choice
from megatron.planner.gpu import H100
from megatron.planner.implementations import MEGATRON_TE, NATIVE, Implementation
from megatron.planner.memory import StageState, stage_state
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict
from megatron.planner.report import launch_command
from megatron.planner.search import Search, balanced_splits, output_layers, search
from megatron.planner.trace_store import UntraceableError
from megatron.training.theoretical_memory_usage import model_size

ROWS = {"llama3.1-8b": 8.030e9, "llama3.1-70b": 70.554e9, "llama3.1-405b": 405.85e9, "qwen2.5-7b": 7.616e9}
PUBLISHED = ROWS | {
    "qwen2.5-14b": 14.770e9,
    "qwen2.5-72b": 72.706e9,
    "gpt2-345m": 354.8e6,
    "gpt3-175b": 175e9,
    "gpt2-1.5b": 1.5576e9,
    "mixtral-8x7b": 46.703e9,
    "olmoe-7b": 6.919e9,
    "qwen3-30b-a3b": 30.532e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
    "olmo3-7b": 7.298e9,
    "deepseek-v3": 685e9 - 2 * 0.927e9,  # the folder holds embedding and output layer of its further token once more
    "codegen-16b": 16.032e9,
    "command-r-35b": 34.981e9,
    "command-r7b": 8.028e9,
    "deepseek-v2-lite": 15.706e9,
    "ernie-4.5-0.3b": 360.7e6,
    "falcon-7b": 6.922e9,
    "falcon-40b": 41.303e9,
    "gemma-7b": 8.538e9,
    "gemma2-9b": 9.242e9,
    "gemma3-1b": 999.9e6,
    "glm4.5-air": 110.469e9 - 2 * 0.621e9,  # as deepseek-v3
    "gptj-6b": 6.051e9,
    "granite3.0-2b": 2.534e9,
    "granite3.0-8b": 8.171e9,
    "helium1-2b": 2.173e9,
    "mistral-7b": 7.242e9,
    "olmo-7b": 6.888e9,
    "olmo2-7b": 7.299e9,
    "persimmon-8b": 9.4e9,
    "phi2-2.7b": 2.780e9,
    "phi3-mini": 3.821e9,
    "pythia-6.9b": 6.857e9,
    "qwen1.5-moe-a2.7b": 14.316e9,
    "qwen3-8b": 8.191e9,
    "qwen3-next-80b-a3b": 79.674e9,
    "seed-oss-36b": 36.151e9,
    "smollm3-3b": 3.075e9,
    "stablelm2-1.6b": 1.6445e9,
    "starcoder2-7b": 7.174e9,
    "starcoder2-3b": 3.03e09,
    "gpt-neox-20b": 2.0555e10,
    "xglm-7.5b": 7.5e09,
    "tinyllama-1.1b": 1.1e09,
    "starcoder2-15b": 1.596e10,
    "starcoder-15b": 1.552e10,
    "smollm2-1.7b": 1.7114e09,
    "smollm2-135m": 1.345e08,
    "qwen3-235b-a22b": 2.3509e11,
    "qwen3-32b": 3.2762e10,
    "qwen3-14b": 1.4768e10,
    "qwen3-4b": 4.022e09,
    "qwen3-1.7b": 1.7206e09,
    "qwen3-0.6b": 5.96e08,
    "qwen2.5-32b": 3.2764e10,
    "qwen2.5-3b": 3.086e09,
    "qwen2.5-1.5b": 1.5437e09,
    "qwen2.5-0.5b": 4.94e08,
    "phi4-14b": 1.466e10,
    "opt-6.7b": 6.658e09,
    "nemotron3-nano-30b-a3b": 3.158e10,
    "nemotron3-super-120b-a12b": 123.6e9,
    "deepseek-v3.2": 685.4e9 - 2 * 0.927e9,  # as deepseek-v3
    "glm-5": 753.9e9,
    "nemotron-h-8b": 8.1e09,
    "nemotron-4-15b": 1.56e10,
    "nanochat-d32": 1.88e09,
    "mpt-30b": 2.996e10,
    "mpt-7b": 6.649e09,
    "moonlight-16b-a3b": 1.596e10,
    "mixtral-8x22b": 1.4062e11,
    "mistral-nemo-12b": 1.2248e10,
    "ministral-8b": 8.02e09,
    "minimax-m2": 2.287e11,
    "llama3.2-3b": 3.213e09,
    "llama3.2-1b": 1.236e09,
    "llama2-70b": 6.8977e10,
    "llama2-13b": 1.3016e10,
    "llama2-7b": 6.738e09,
    "kimi-linear-48b-a3b": 4.91e10,
    "kimi-k2": 1.0265e12,
    "hunyuan-a13b": 8.04e10,
    "granite4.0-h-small": 3.22e10,
    "glm4-9b": 9.4e09,
    "gemma4-e2b": 4.628569e9,  # in transformers, without vision and audio
    "gemma4-e4b": 7.463013e9,  # likewise
    "gemma4-31b": 3.0697e10,
    "gemma4-26b-a4b": 2.5233e10,
    "gemma2-27b": 2.7227e10,
    "gemma2-2b": 2.614e09,
    "gemma-2b": 2.506e09,
    "exaone4-32b": 3.2e10,
    "exaone4-1.2b": 1.28e09,
    "ernie-4.5-21b-a3b": 2.183e10,
    "dots.llm1": 1.428e11,
    "deepseek-v2": 2.35741e11,
    "bloom-176b": 1.76247e11,
    "bloom-7b1": 7.069e09,
    "bamba-9b": 9.78e09,
    "apertus-70b": 7.06e10,
    "apertus-8b": 8.053e09,
}
_RUN = "--seq-length 1024 --global-batch-size 48 --micro-batch-size 1 --train-iters 5 --lr 1e-4"
RUN = _RUN.split()


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_parameters_that_were_published(name: str) -> None:
    size = model_size(read_planned_run([*preset_words(name), *RUN], 1).config)
    assert size.block + size.embedding == pytest.approx(PUBLISHED[name], rel=5e-3)


@pytest.mark.full
def test_the_best_command_parses_and_is_predicted_as_the_table_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "all.json"
    words = "--model-preset llama3.1-8b --gpus 8 --seq-length 8192 --global-batch-size 48 --train-tokens 1B"
    assert main([*words.split(), "--json", str(table), "--html", str(tmp_path / "page.html")]) == 0
    ranking = json.loads(table.read_text())
    best = ranking["ranked"][0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank")
    assert "days" in lines[0]
    launched = shlex.split(lines[-1])
    assert launched[:4] == ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py"]
    config = resolve_arguments(launched[4:], 8, needs_files=False).config
    plan = Plan.of(read_planned_run(launched[4:], 8).config)
    prediction = predict(plan, NATIVE, H100)
    assert prediction.time is not None
    assert 1e3 * prediction.time.total == pytest.approx(best["ms_per_step"])
    assert config.parallel_sizes.tp == best["tp"]
    assert all(each["margin_mib"] > 0 for each in ranking["ranked"])
    speeds = [each["ms_per_step"] for each in ranking["ranked"]]
    assert speeds == sorted(speeds)
    kinds = {each["kind"] for each in ranking["dropped"]}
    assert {"oom", "slower"} <= kinds
    assert all(each["reason"] for each in ranking["dropped"])
    page = (tmp_path / "page.html").read_text()
    assert '<pre id="ranking"' in page
    # What was dropped is text, whose lines may be broken.
    assert "<li>excluded, " in page


SHORT = ("--model-preset", "gpt2-345m", "--gpus", "1", "--precision", "bf16")


def launched_by(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the words of the launch command that is printed for a search over one GPU."""
    assert main([*SHORT, *words]) == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("torchrun"))
    return shlex.split(command)


def test_values_behind_an_equals_sign_stay_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ("--seq-length=512", "--global-batch-size=16", "--lr=7e-5", "--train-iters=37", "--lr-warmup-iters=3")
    launched = launched_by((*typed, "--train-tokens", "1B"), capsys)
    assert set(typed) <= set(launched)
    assert not {"--lr", "--train-iters"} & set(launched)


def test_flags_without_effect_are_named_under_the_launch_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *RUN, "--use-sharp"]) == 0
    *_, command, note = capsys.readouterr().out.splitlines()
    assert command.startswith("torchrun")
    assert "--use-sharp" in command
    assert note.startswith("--use-sharp has no effect: ")


@pytest.mark.parametrize(
    ("batch", "size"),
    [(("--step-batch-size-schedule", "0:32"), 32), (("--global-batch-size=16", "--lr-warmup-iters", "2000"), 16)],
)
def test_tokens_are_as_many_iterations_as_the_batch_makes_them(
    batch: tuple[str, ...], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = launched_by((*batch, "--seq-length", "512", "--train-tokens", "1B"), capsys)
    assert int(launched[launched.index("--train-iters") + 1]) == 10**9 // (512 * size)


@pytest.mark.parametrize(("world_size", "machines"), [(6, (6, 1)), (12, (6, 2)), (64, (8, 8)), (7, (7, 1))])
def test_the_command_starts_as_many_processes_as_there_are_gpus(world_size: int, machines: tuple[int, int]) -> None:
    words = launch_command(["--lr", "1"], world_size).split()
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    assert (int(words[words.index("--nproc-per-node") + 1]), nodes) == machines


def test_a_choice_as_flags_is_the_choice_as_configuration() -> None:
    choice = Choice(
        tp=2,
        pp=3,
        cp=2,
        chunks=4,
        counts_ends=True,
        micro_batch_size=3,
        recompute="full",
        sharding="optim_grads",
        precision="fp8",
    )
    words = (*preset_words("llama3.1-8b"), *RUN, "--tensor-model-parallel-size", "8", "--num-layers", "34")
    by_flags = read_planned_run(choice.words(words), 24).config
    base = read_planned_run((*preset_words("llama3.1-8b"), *RUN, "--num-layers", "34", "--bf16"), 24).config
    applied = choice.apply(base)
    assert Plan.of(by_flags) == Plan.of(applied)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--gpus is missing"),
        (["--gpus", "0"], "--gpus 0 is not between"),
        (
            ["--gpus", "8", "--model-preset", "llama9"],
            "--model-preset llama9 is not known; use llama2-7b",
        ),
        (["--gpus", "8", "--train-tokens", "many"], "--train-tokens many is not a number of tokens"),
        (["--gpus", "8", "--top", "0"], "--top 0 is not positive"),
        (["--gpus", "8"], "--global-batch-size is missing"),
        (["--gpus", "8", "--global-batch-size", "8"], "--num-layers is missing"),
        (["--gpus", "8", "--gpu", "a100-80gb", "--precision", "fp8", *RUN], "a100-80gb does not support FP8 GEMMs"),
        (["--gpus", "1", "--model-preset", "llama3.1-70b", *RUN], "no layout fits on 1 x h100-80gb"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--evaluate x --json a --html b --gpus 4 --precision bf16",
            "not supported with --gpus, --precision, --json, --html",
        ),
        (
            "--evaluate x --model-preset gpt2-345m --train-tokens 1B",
            "not supported with --model-preset, --train-tokens",
        ),
        ("--evaluate x --top 0", "not supported with --top"),
        ("--gpus 8 --output x", "--output is supported only with --evaluate"),
    ],
)
def test_flags_of_the_other_mode_are_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


EXPERTS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 1024 --swiglu "
    "--num-experts 12 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-layer-freq 2 "
    "--tokenizer-type NullTokenizer --vocab-size 1000"
)


def test_experts_are_spread_over_every_number_of_ranks_that_divides_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "all.json"
    words = f"{EXPERTS} --expert-model-parallel-size 3 --gpus 2 --seq-length 1024 --global-batch-size 8"
    assert main([*words.split(), "--precision", "bf16", "--json", str(table)]) == 0
    ranking = json.loads(table.read_text())
    assert {each["ep"] for each in ranking["ranked"]} == {1, 2}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1:6] == ["tp", "pp", "cp", "dp", "ep"]
    assert any(
        "searched instead of taken from the command line: --expert-model-parallel-size" in line for line in lines
    )
    found, predicted = len(ranking["ranked"]), ranking["predicted"]
    excluded = found + len(ranking["dropped"]) - predicted
    counts = f"{excluded} were excluded without a full prediction, {predicted} were predicted, and {found} of these fit"
    assert f"{excluded + predicted} layouts: {counts}; times and memory are predictions" in lines
    launched = next(shlex.split(line) for line in lines if line.startswith("torchrun"))
    best, config = ranking["ranked"][0], resolve_arguments(launched[4:], 2, needs_files=False).config
    assert config.model.expert_model_parallel_size == best["ep"]
    prediction = predict(Plan.of(read_planned_run(launched[4:], 2).config), NATIVE, H100)
    assert prediction.time is not None
    assert 1e3 * prediction.time.total == pytest.approx(best["ms_per_step"])


SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --global-batch-size 4 --micro-batch-size 1 --train-iters 5 "
    "--lr 1e-4 --bf16"
)
TIGHT = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 8192 --max-position-embeddings 8192 "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --global-batch-size 2 --micro-batch-size 1 --train-iters 5 "
    "--lr 1e-4 --bf16"
)


def test_a_layout_whose_model_cannot_be_built_or_traced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_planned_run(SMALL.split(), 2).config

    def states(plan: Plan, stage: int, implementation: Implementation) -> StageState:
        if plan.model.fp8.fp8_format is not None:
            raise ConfigurationError("no room for its scales")
        return stage_state(plan, stage, implementation)

    def untraceable(*given: object, **named: object) -> float:
        raise UntraceableError("not with this attention")

    monkeypatch.setattr("megatron.planner.search.stage_state", states)
    monkeypatch.setattr(Bounds, "seconds", untraceable)
    monkeypatch.setattr("megatron.planner.search._try_batches", untraceable)
    found = search(config, H100, NATIVE, ["bf16", "fp8"], lambda config: [], wanted=1)
    reasons = {(each.choice.precision, each.kind, each.reason) for each in found.dropped}
    assert reasons == {("bf16", "refused", "not with this attention"), ("fp8", "refused", "no room for its scales")}
    assert not found.candidates


@pytest.mark.full
def test_a_way_to_recompute_that_the_runs_own_checks_refuse_is_no_candidate() -> None:
    config, gpu = read_planned_run(TIGHT.split(), 2).config, dataclasses.replace(H100, memory_bytes=9 * 2**30)

    def recomputes(found: Search) -> set[str | None]:
        return {candidate.config.model.recompute_granularity for candidate in found.candidates}

    tried: list[tuple[int, int]] = []
    program = MEGATRON_TE
    free = search(config, gpu, program, ["bf16"], lambda config: [], lambda done, total: tried.append((done, total)))
    assert "full" in recomputes(free)
    assert tried == [(number, len(tried)) for number in range(1, len(tried) + 1)]
    assert len(tried) == 5
    bound = search(
        config,
        gpu,
        program,
        ["bf16"],
        lambda config: ["full is refused"] if config.model.recompute_granularity == "full" else [],
    )
    assert bound.candidates
    assert "full" not in recomputes(bound)
    assert any(dropped.kind == "refused" and dropped.reason == "full is refused" for dropped in bound.dropped)


MODEL = (
    *("--num-layers", "10", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50256"),
    *("--global-batch-size", "12", "--lr", "1e-4", "--train-iters", "9", "--mock-data"),
)
CHOICE = Choice(
    tp=1,
    pp=4,
    cp=1,
    chunks=1,
    counts_ends=False,
    micro_batch_size=1,
    recompute="none",
    sharding="no_shard",
    precision="bf16",
)


@pytest.mark.parametrize(
    ("split", "chunks", "flags", "told"),
    [
        ((3, 3, 3, 1), 1, ("--decoder-last-pipeline-num-layers", "1"), "3x3 1"),
        ((1, 3, 3, 3), 1, ("--decoder-first-pipeline-num-layers", "1"), "1 3x3"),
        ((2, 3, 3, 2), 1, ("--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "2"), ""),
        ((2, 3, 4, 1), 1, ("--pipeline-model-parallel-layout", "Et*2|t*3|t*4|t*1L"), "2 3 4 1"),
        ((1, 1, 1, 1, 2, 2, 1, 1), 2, ("--pipeline-model-parallel-layout", "Et*1|t*1|t*1|t*1|t*2|t*2|t*1|t*1L"), ""),
    ],
)
def test_flags_of_a_split_parse_to_its_stages(
    split: tuple[int, ...], chunks: int, flags: Sequence[str], told: str
) -> None:
    choice = dataclasses.replace(CHOICE, split=split, chunks=chunks)
    words = choice.words((*MODEL, "--bf16"))
    assert " ".join(flags) in " ".join(words)
    assert told in choice.describe_split()
    parsed = Plan.of(read_planned_run(words, 4).config)
    applied = Plan.of(choice.apply(read_planned_run((*MODEL, "--micro-batch-size", "1", "--bf16"), 4).config))
    assert parsed.stage_layout == applied.stage_layout
    assert [len(stage.layer_numbers) for stage in parsed.stage_layout.stages] == list(split)


def test_the_last_stage_has_fewer_layers_where_its_output_layer_is_large() -> None:
    model = read_planned_run((*MODEL, "--micro-batch-size", "1"), 1).config.model
    assert 4 < output_layers(model) < 5
    one, *two = balanced_splits(model, 4, 0)
    # The slowest rank has three layers, not 2.5 and the output layer.
    assert one == (3, 3, 3, 1)
    assert two == []
    assert list(balanced_splits(dataclasses.replace(model, num_layers=1), 4, 0)) == []
    small = dataclasses.replace(model, num_layers=12, vocab_size=100)
    assert list(balanced_splits(small, 4, 3)) == []


def test_uneven_and_zero_bubble_layouts_are_ranked_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*MODEL, "--gpus", "4", "--precision", "bf16", "--json", str(tmp_path / "all.json"), "--top", "100")
    # With dropout, attention around a ring runs in blocks, of which each micro-batch size has a trace of its own.
    assert main([*words, "--attention-dropout", "0", "--hidden-dropout", "0"]) == 0
    head, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "schedule" in head
    assert head.endswith("layers")
    ranked = json.loads((tmp_path / "all.json").read_text())["ranked"]
    assert len(rows) == len(ranked)
    kinds = {(each["pp"], each["pipeline_schedule"], bool(each["split"])) for each in ranked}
    assert {(4, "1f1b", True), (4, "zero-bubble", True), (2, "1f1b", False), (2, "interleaved", False)} <= kinds
    row = next(row for row, each in zip(rows, ranked) if each["split"] and each["schedule"] == "zero-bubble")
    assert "zero-bubble" in row
    # With as much before them, a schedule that fills its bubble is faster.
    uneven = [each for each in ranked if each["pp"] == 4 and each["split"] and each["micro_batch_size"] == 1]
    fastest = min(uneven, key=lambda each: each["ms_per_step"])
    assert fastest["pipeline_schedule"] == "zero-bubble"


def test_megatron_is_not_offered_a_zero_bubble_schedule_and_searched_flags_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*MODEL, "--gpus", "4", "--precision", "bf16", "--implementation", "megatron-te", "--top", "500")
    assert main([*words, "--pipeline-schedule", "1f1b", "--bf16"]) == 0
    printed = capsys.readouterr().out
    assert "zero-bubble" not in printed
    assert "\nsearched instead of taken from the command line: --pipeline-schedule, --bf16\n" in printed


BOUNDED_MODEL = (
    *("--num-layers", "8", "--hidden-size", "4096", "--num-attention-heads", "32", "--seq-length", "4096"),
    *("--max-position-embeddings", "4096", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50256"),
    *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--global-batch-size", "16", "--micro-batch-size", "1", "--lr", "1e-4", "--train-iters", "9", "--mock-data"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
BOUNDED_EXPERTS = (
    "--num-experts",
    "8",
    "--moe-router-topk",
    "2",
    "--moe-ffn-hidden-size",
    "2048",
    "--ffn-hidden-size",
    "4096",
)
_WANTED = 5


def config_of(*flags: str, world_size: int) -> RunConfig:
    config = read_planned_run([*BOUNDED_MODEL, *flags, "--bf16"], 1).config
    return dataclasses.replace(config, world_size=world_size)


def fastest(found: Search) -> list[tuple[object, float]]:
    return [(each.choice, each.seconds) for each in found.ranked[:_WANTED]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "world_size", "precisions"),
    [((), 8, ("bf16", "fp8")), (BOUNDED_EXPERTS, 4, ("bf16",))],
    ids=["dense", "experts"],
)
def test_no_choice_is_faster_than_its_bound_and_the_fastest_are_found(
    flags: tuple[str, ...], world_size: int, precisions: tuple[str, ...]
) -> None:
    config = config_of(*flags, world_size=world_size)
    every = search(config, H100, NATIVE, precisions, lambda config: ())
    bounded = search(config, H100, NATIVE, precisions, lambda config: (), wanted=_WANTED)
    assert fastest(bounded) == fastest(every)
    assert bounded.num_predicted < every.num_predicted
    assert any(each.reason.startswith("a step takes at least") for each in bounded.dropped)
    bounds = Bounds(H100, NATIVE)
    for each in every.candidates:
        plan = Plan.of(each.config)
        states = [stage_state(plan, stage, NATIVE) for stage in range(plan.parallel_sizes.pp)]
        assert bounds.seconds(plan, states) <= each.seconds * (1 + 1e-9), each.choice
        assert bounds.seconds(plan, states, 0.0) <= bounds.seconds(plan, states) * (1 + 1e-9), each.choice
        assert bounds.first_stage_bytes(plan, states[0]) <= each.prediction.stages[0].total, each.choice


@pytest.mark.full
def test_attention_whose_keys_travel_round_a_ring_is_not_slower_than_predicted() -> None:
    length = "65536"
    flags = ("--seq-length", length, "--max-position-embeddings", length, "--context-parallel-size", "2")
    plan = Plan.of(read_planned_run([*BOUNDED_MODEL, *flags, "--bf16"], 2).config)
    time = predict(plan, NATIVE, H100).time
    assert time is not None
    assert Bounds(H100, NATIVE).seconds(plan, [stage_state(plan, 0, NATIVE)]) <= time.total


def test_no_layout_of_another_program_is_faster_than_its_bound() -> None:
    config = config_of(world_size=2)
    every = search(config, H100, MEGATRON_TE, ("bf16",), lambda config: ())
    bounded = search(config, H100, MEGATRON_TE, ("bf16",), lambda config: (), wanted=_WANTED)
    assert fastest(bounded) == fastest(every)
    bounds = Bounds(H100, MEGATRON_TE)
    for each in every.candidates:
        plan = Plan.of(each.config)
        states = [stage_state(plan, stage, MEGATRON_TE) for stage in range(plan.parallel_sizes.pp)]
        assert bounds.seconds(plan, states) <= each.seconds * (1 + 1e-9), each.choice
