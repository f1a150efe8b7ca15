"""Predictions of the measured runs: how far from them they may be, with committed constants, and on unlike records."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner.published import published_records
from benchmarks.planner.run import fit, predictions
from megatron.cli.plan import main
from megatron.core.errors import DataError
from megatron.core.parallel_config import ParallelSizes
from megatron.planner.communication import Links
from megatron.planner.evaluation import EvaluatedRun, describe_errors, evaluate, read_runs
from megatron.planner.gpu import H100

RUNS = Path(__file__).resolve().parents[3] / "benchmarks/planner/measured_runs.json"
RECORD: dict[str, Any] = next(
    run for run in json.loads(RUNS.read_text(encoding="utf-8"))["runs"] if run["id"] == "003-978"
)
"""Llama 3.1 8B in fp8 on four stages."""


EXPERTS = {"model_num_experts": 8, "model_moe_router_topk": 2, "model_moe_ffn_hidden_size": 4096}


@pytest.fixture(scope="module")
def evaluated() -> dict[str, EvaluatedRun]:
    return {each.run.id: each for each in evaluate(read_runs(RUNS))}


def predicted(tmp_path: Path, **changes: Any) -> EvaluatedRun:
    """Return the prediction of the record with other fields; one named model_X is of the model."""
    record = copy.deepcopy(RECORD)
    for name, value in changes.items():
        part, key = (record["model"], name.removeprefix("model_")) if name.startswith("model_") else (record, name)
        part[key] = value
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": [record]}))
    (each,) = evaluate(read_runs(path))
    return each


def test_every_scored_row_is_within_the_targets(evaluated: dict[str, EvaluatedRun]) -> None:
    memory = {name: abs(each.memory_error) for name, each in evaluated.items() if each.memory_error is not None}
    time = {name: abs(each.time_error) for name, each in evaluated.items() if each.time_error is not None}
    assert len(memory) == 19
    assert max(memory.values()) < 0.03
    assert len(time) == 16
    assert max(time.values()) < 0.05
    assert sum(time.values()) / len(time) < 0.02
    assert {each.is_outcome_right for each in evaluated.values()} == {True, None}
    lines = describe_errors(list(evaluated.values()))
    assert [line for line in lines if line.startswith("fastest")] == [
        "fastest of Llama-3.1-8B: 003-983, as predicted",
        "fastest of Qwen2.5-14B: 003-2283, as predicted",
    ]


def test_parameters_and_padding_are_those_that_were_logged(evaluated: dict[str, EvaluatedRun]) -> None:
    compared = 0
    for each in evaluated.values():
        logged = each.run.fields.values.get("parameters_per_rank_logged")
        for place, number in (logged or {}).items():
            assert each.prediction.stages[int(place.partition("pp")[2])].parameters == number
            compared += 1
        assert each.padded_vocab_size in (None, each.run.fields.part("model").integer("padded_vocab_size"))
    assert compared == 13


def test_each_rank_of_the_345m_runs_peaks_where_it_did(evaluated: dict[str, EvaluatedRun]) -> None:
    compared = 0
    for each in evaluated.values():
        ranks = each.run.fields.part("memory").part("per_rank").values
        sizes = each.run.fields.values
        for rank, peaks in ranks.items():
            stage = each.prediction.stages[int(rank) * sizes["pp"] // sizes["world_size"]]
            assert stage.total / 2**20 == pytest.approx(peaks["max_allocated"], rel=0.03), (each.run.id, rank)
            compared += 1
    assert compared == 11


@pytest.mark.full
def test_runs_of_a_model_are_predicted_from_those_of_the_others() -> None:
    """The model with the most runs is the hardest to do without."""
    runs = read_runs(RUNS)
    name = "Llama-3.1-8B"
    times, platform = fit([run for run in runs if run.model_name != name])
    without = predictions([run for run in runs if run.model_name == name], times, platform)
    assert max(abs(each.memory_error or 0.0) for each in without) < 0.06
    assert max(abs(each.time_error or 0.0) for each in without) < 0.08


def test_what_others_published_is_within_a_tenth() -> None:
    peers = evaluate(published_records(RUNS.parent / "published_runs.json"))
    assert {each.run.id: abs(each.time_error or 1.0) < 0.1 for each in peers} == {
        "mb-8b-2511": True,
        "mb-8b-2509": True,
        "mb-70b-2511": True,
        "mb-405b-2511": True,
        # Experts, within 20 % where it is said what held the measured run up.
        "mb-qwen3-30b-2511": False,
        "mb-gptoss-2511": False,
    }
    assert abs(next(each.time_error or 1.0 for each in peers if each.run.id == "mb-gptoss-2511")) < 0.2


def test_more_dense_runs_that_were_published_are_within_three_twentieths() -> None:
    others = {each.run.id: each for each in evaluate(read_runs(RUNS.parent / "other_runs.json"))}
    assert {name: each.prediction.reason for name, each in others.items() if each.prediction.outcome != "ok"} == {}
    errors = {name: abs(each.time_error or 1.0) for name, each in others.items()}
    # Half of the products of these two are computed again, which no plan says.
    odd = {"tt-llama3-8b-h200-32", "tt-llama3-8b-h200-64"}
    dense = [name for name in others.keys() - odd if "num_experts" not in others[name].run.fields.part("model").values]
    assert len(dense) == 17
    assert {name: errors[name] for name in dense if errors[name] > 0.15} == {}
    # The layout of this one is that of the row which is 58 % off, by a release in which its makers mended it.
    assert errors["mb-qwen3-30b-a3b-26.02.01"] < 0.2


def test_experts_are_whole_where_a_record_cannot_mean_otherwise(tmp_path: Path) -> None:
    """If nothing else is said, Megatron cuts experts as the rest; its recipes do not, nor do ranks that are too few."""
    cut = predicted(tmp_path, **EXPERTS, tp=2, dp=4, ep=4)
    whole = predicted(tmp_path, **EXPERTS, tp=2, dp=4, ep=8)
    of_recipe = predicted(tmp_path, **EXPERTS, tp=2, dp=4, ep=4, software={"framework": "Megatron Bridge 25.11"})
    assert cut.prediction.stages[1].parameters * 2 > of_recipe.prediction.stages[1].parameters
    assert {each.prediction.outcome for each in (cut, whole, of_recipe)} == {"ok"}
    told = predicted(tmp_path, **EXPERTS, tp=2, dp=4, ep=4, etp=1)
    assert told.prediction.stages[1].parameters == of_recipe.prediction.stages[1].parameters


def test_experts_of_a_published_recipe_without_recompute_fit() -> None:
    """Its settings are published: nothing is computed again, so it must fit into the card that it ran on."""
    records = published_records(RUNS.parent / "published_runs.json")
    (run,) = (each for each in records if each.id == "mb-qwen3-30b-2511")
    run.fields.values["hardware"]["mem_total_mib"] = 81559
    (each,) = evaluate([run])
    assert each.prediction.outcome == "ok"
    assert each.prediction.reason is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recompute": "cpu_offload"}, "use pp 1, recompute, or the implementation native"),
        ({"layers_per_virtual_stage": 3}, "use 1, 2, 4 or 8"),
        ({"vpp": 2, "global_batch": 1016, "dp": 8}, "127 micro-batches are not divisible by pp 4"),
        ({"pp": 3, "world_size": 24}, "32 layers"),
        ({"global_batch": 1020}, "use a multiple of 8"),
        ({"dp": 7}, "world_size 32 is not tp x pp x cp x dp"),
        ({"ep": 2}, "set num_experts, or use ep 1"),
        ({**EXPERTS, "ep": 3}, "divisible by expert(3)"),
        ({**EXPERTS, "model_num_experts": 6, "ep": 4}, "use an ep that divides it"),
        ({**EXPERTS, "model_moe_router_topk": 9}, "moe_router_topk 9 is more than the 8 experts"),
        ({"fsdp": 3}, "fsdp 3 does not divide the 8 ranks with the same weights; use a divisor"),
        ({"precision": "int4"}, "use one of bf16, fp16, fp8, fp32"),
        ({"hardware": {"gpu": "NVIDIA A100 80GB"}}, "a100-80gb does not support FP8 GEMMs"),
        ({"tp": 16, "dp": 1, "pp": 2, "model_num_query_groups": 12}, "one must be a multiple of the other"),
        ({"cp": 8, "dp": 1, "model_seq_length": 8200}, "use a multiple of 16"),
    ],
)
def test_plans_that_cannot_run_are_refused_with_what_would_work(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    each = predicted(tmp_path, **changes)
    assert each.prediction.outcome == "error"
    assert reason in (each.prediction.reason or "")
    assert each.ms_per_iter is None


def test_offload_in_a_pipeline_runs_under_native(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": [{**RECORD, "recompute": "cpu_offload"}]}))
    output = tmp_path / "predictions.json"
    assert main(["--evaluate", str(path), "--implementation", "native", "--output", str(output)]) == 0
    (prediction,) = json.loads(output.read_text())["runs"]
    assert prediction["outcome"] == "ok"
    assert prediction["reason"] is None


def test_more_work_takes_more_time_and_less_memory_is_too_little(tmp_path: Path) -> None:
    plain = predicted(tmp_path)
    full = predicted(tmp_path, recompute="full")
    half = predicted(tmp_path, precision="bf16")
    slow = predicted(tmp_path, hardware={"gpu": "NVIDIA A800 80GB"}, precision="bf16")
    small = predicted(tmp_path, hardware={"gpu": "A100-SXM4-40GB"}, precision="bf16")
    times = [each.ms_per_iter or 0.0 for each in (plain, full, half, slow)]
    assert times == sorted(times)
    assert full.memory_mib is not None
    assert plain.memory_mib is not None
    assert full.memory_mib < plain.memory_mib
    assert [each.prediction.outcome for each in (slow, small)] == ["ok", "oom"]
    assert "activations" in (small.prediction.reason or "")


def test_an_unknown_gpu_has_memory_and_no_time(tmp_path: Path) -> None:
    each = predicted(tmp_path, hardware={"gpu": "NVIDIA GH900 1000GB", "mem_total_mib": 81559})
    assert each.memory_mib == pytest.approx(54416, rel=0.03)
    assert each.ms_per_iter is None
    assert "GH900" in (each.prediction.reason or "")


def test_fields_that_are_left_out_are_as_most_runs_have_them(tmp_path: Path) -> None:
    names = ("id", "model", "hardware", "precision", "pp", "world_size", "global_batch")
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": [{name: RECORD[name] for name in names}]}))
    (each,) = evaluate(read_runs(path))
    assert each.ms_per_iter == predicted(tmp_path).ms_per_iter
    assert (each.memory_error, each.time_error) == (None, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[1]", "has no list of records"),
        ('{"runs": [1]}', "has no list of records"),
        ('{"runs": [{}]}', "record 0: id is missing"),
        ('{"runs": [{"id": "a"}, {"id": "a"}]}', "two records have the id a"),
        ('{"runs": [{"id": "a", "model": 3}]}', "run a: model is 3; an object is expected"),
        ('{"runs": [{"id": "a", "model": {}, "global_batch": 1}]}', "model: hidden_size is missing"),
        ('{"runs": [{"id": "a", "ms_per_iter": NaN}]}', "ms_per_iter is NaN; a number above 0 is expected"),
        ('{"runs": [{"id": "a", "tp": 1.5, "model": {}}]}', "tp is 1.5; a whole number"),
        ('{"runs": [{"id": "a", "tp": 0, "model": {}}]}', "tp is 0; a whole number of 1 or more is expected"),
        ('{"runs": [{"id": "a", "sequence_parallel": "yes", "tp": 2, "hardware": 1}]}', "hardware is 1"),
    ],
)
def test_files_of_another_form_are_refused_in_one_line(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    path.write_text(content)
    with pytest.raises(DataError, match=re.escape(words)):
        evaluate(read_runs(path))
    assert main(["--evaluate", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_record_that_is_no_training_run_is_left_out_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "runs.json", tmp_path / "predictions.json"
    inference = {name: value for name, value in RECORD.items() if name not in ("global_batch", "num_microbatches")}
    records = [{**RECORD, "id": "first"}, {**inference, "id": "served"}, {"tp": 2}, {**RECORD, "id": "last"}]
    path.write_text(json.dumps({"runs": records}))
    assert main(["--evaluate", str(path), "--output", str(output)]) == 1
    assert [run["id"] for run in json.loads(output.read_text())["runs"]] == ["first", "last"]
    printed = capsys.readouterr()
    assert "overall" in printed.out
    assert printed.err.splitlines() == [
        f"WARNING: skipped: {path}: record 2: id is missing; a string that identifies the record is expected",
        f"WARNING: skipped: {path}: run served: num_microbatches is missing; a whole number of 1 or more is expected",
        f"error: 2 of 4 records of {path} were skipped (see the warnings above); complete or remove them",
    ]


def test_the_command_prints_errors_and_writes_every_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "predictions.json"
    assert main(["--evaluate", str(RUNS), "--output", str(output)]) == 0
    assert "overall" in capsys.readouterr().out
    written = json.loads(output.read_text())["runs"]
    assert [run["id"] for run in written] == [run.id for run in read_runs(RUNS)]
    keys = {"id", "outcome", "memory_mib", "ms_per_iter", "tflops_per_gpu", "reason"}
    assert all(keys <= set(run) for run in written)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "abacus"], "there are no built-in figures"),
        (["--implementation", "abacus"], "possible values: native, megatron-te"),
        (["--output", "/no/such/folder/file"], "cannot be written"),
    ],
)
def test_names_that_are_not_known_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--evaluate", str(RUNS), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_spread_experts_take_less_memory_and_no_less_time_for_their_tokens(tmp_path: Path) -> None:
    whole, spread = (predicted(tmp_path, **EXPERTS, precision="bf16", ep=ep) for ep in (1, 4))
    assert whole.prediction.time is not None
    assert spread.prediction.time is not None
    assert spread.memory_mib is not None
    assert whole.memory_mib is not None
    assert spread.memory_mib < whole.memory_mib
    assert whole.prediction.time.layer.expert_parallel == 0.0
    assert spread.prediction.time.layer.expert_parallel > 0.0


def test_weights_sharded_over_a_part_of_the_ranks_are_gathered_sooner_and_updated_later(tmp_path: Path) -> None:
    whole, part = (predicted(tmp_path, fsdp=fsdp, precision="bf16") for fsdp in (8, 4))
    assert whole.memory_mib is not None
    assert part.memory_mib is not None
    assert whole.memory_mib < part.memory_mib
    times = [each.prediction.time for each in (whole, part)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].exposed_data_parallel < times[0].exposed_data_parallel
    assert times[1].update == pytest.approx(2 * times[0].update)


def test_copies_of_what_is_sharded_sum_their_shards_over_what_joins_them() -> None:
    """Two copies of eight neighbors each lie on two machines, of which each GPU has a port of its own."""
    links = Links(H100, ParallelSizes(dp=16))
    assert links.copies_seconds(10**9, 1) == 0.0
    assert links.copies_seconds(10**9, 2) == pytest.approx(10**9 / (50e9 * 0.8), rel=1e-3)
    assert links.replica_seconds(10**9, 2) < links.replica_seconds(10**9)


def test_experts_in_fp8_are_planned_with_the_recipe_that_is_named(tmp_path: Path) -> None:
    path, output = tmp_path / "ours.json", tmp_path / "predictions.json"
    outcomes = {}
    for precision in ("fp8", "fp8 current scaling"):
        each = predicted(tmp_path, **EXPERTS, precision=precision)
        path.write_text(json.dumps({"runs": [each.run.fields.values]}))
        assert main(["--evaluate", str(path), "--implementation", "native", "--output", str(output)]) == 0
        (outcomes[precision],) = json.loads(output.read_text())["runs"]
    assert [outcome["reason"] for outcome in outcomes.values()] == [None, None]
    # Delayed scaling, which is meant where none is named, does not read an operand for its amax first.
    assert 0 < outcomes["fp8"]["ms_per_iter"] <= outcomes["fp8 current scaling"]["ms_per_iter"]
