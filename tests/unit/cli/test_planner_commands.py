"""Commands of the planner: calibrate, plan --verify, and tools/report_theoretical_memory.py."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli import calibrate, plan, planner_arguments
from megatron.cli.arguments import Parser
from megatron.cli.doctor import benchmarks
from megatron.cli.explain import build_parser as explain_parser
from megatron.cli.explain import main as explain
from megatron.cli.plan import main
from megatron.cli.planner_arguments import check_agreement, describe_verified, read_planned_run, verify_fitting_plan
from megatron.cli.report_theoretical_memory import main as report_main
from megatron.core.errors import ConfigurationError, InputError, MegatronError
from megatron.planner.gpu import B200, H100, gpu_to_json, read_gpu
from megatron.planner.memory import StageMemory
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.planner.verified_stage import VerifiedStage
from megatron.verification.traffic import Volume
from tests.unit.planner.planned_words import SMALL


def test_a_measured_machine_is_planned_with_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = benchmarks.Sizes(products=((64, 32, 48), (96, 64, 32)), attention_length=64, copied_bytes=1 << 16)
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.setattr(benchmarks, "ON_CPU", small)
    file = tmp_path / "machine.json"
    assert calibrate.main(["--output", str(file)]) == 0
    gpu = read_gpu(file)
    assert gpu.name == "measured, a CPU"
    assert 0 < gpu.product_share <= 1
    assert gpu.float8_flops == 0
    assert gpu.link_bandwidth == H100.link_bandwidth
    assert "TFLOP/s of bfloat16 GEMMs: 64x32x48" in capsys.readouterr().out
    assert explain([*SMALL, "--world-size", "12", "--gpu", str(file)]) == 0
    assert "12 ranks of measured, a CPU" in capsys.readouterr().out


def test_figures_read_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "h100.json"
    file.write_text(json.dumps(gpu_to_json(H100)))
    assert read_gpu(file) == dataclasses.replace(H100)


def test_the_exit_code_tells_scripts_that_a_run_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, values = tmp_path / "small.json", gpu_to_json(H100)
    file.write_text(json.dumps(values | {"memory_bytes": 1 << 20}))
    words = [*SMALL, "--world-size", "12"]
    assert explain([*words, "--exit-code"]) == 0
    assert "outcome: ok" in capsys.readouterr().out
    for more, status in (([], 0), (["--exit-code"], 1)):
        assert explain([*words, "--gpu", str(file), *more]) == status
        assert "outcome: oom" in capsys.readouterr().out
    assert explain([*SMALL, "--world-size", "13", "--exit-code"]) == 2


def test_files_of_earlier_versions_have_one_share_for_all_matmuls(tmp_path: Path) -> None:
    file, values = tmp_path / "h100.json", gpu_to_json(H100)
    del values["float8_share"], values["float4_flops"]
    file.write_text(json.dumps(values))
    assert read_gpu(file).float8_share == H100.product_share
    assert read_gpu(file).float4_flops == 0
    file.write_text(json.dumps(gpu_to_json(B200)))
    assert read_gpu(file) == B200


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"half_flops": 0}, "half_flops is 0, but must be a number above 0"),
        ({"memory_bandwidth": 1e999}, "memory_bandwidth is inf"),
        ({"product_share": True}, "product_share is True"),
        ({"float8_share": 0}, "float8_share is 0, but float8_flops"),
        ({"memory_bytes": "80"}, "memory_bytes is '80'"),
        ({"capability": [9]}, "capability"),
        ({"flash": {"64": {}}}, "forward is None"),
        ({"cudnn": 3}, "the cudnn rates for head size 64 are missing"),
        ({"sources": None}, "sources must be a list"),
    ],
)
def test_a_file_of_other_figures_is_refused(change: dict[str, object], told: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(gpu_to_json(H100) | change))
    with pytest.raises(ConfigurationError, match=r"tools/calibrate\.py") as error:
        read_gpu(file)
    assert told in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 5000, "\x00"])
def test_a_file_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"the file is not (valid JSON|a JSON object)"):
        read_gpu(file)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--output", "machine.txt"], "ends in .json"),
        (["--output", "/nowhere/machine.json"], "cannot be written"),
        (["--output", "machine.json", "--like", "v100"], "--gpu v100: there are no built-in figures"),
    ],
)
def test_wrong_words_are_answered_before_anything_is_measured(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate.main(words) == 2
    assert told in capsys.readouterr().err


REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"),
)
GIB = 2**30
PLANNED = StageMemory(
    parameters=7, weights=GIB, gradients=2 * GIB, optimizer=0, activations=3 * GIB, logits=0, buffers=0
)
VERIFIED = VerifiedStage(
    stage=1,
    rank=4,
    num_microbatches=64,
    num_run=8,
    planned=PLANNED,
    parameters=7,
    peak_bytes=6 * GIB,
    holders={"weights": GIB},
    num_communications=5,
    unlike=(),
)


@pytest.mark.full
@pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this")
def test_the_best_layout_is_run_dry_and_is_as_planned(tmp_path: Path) -> None:
    where = ("--gpus", "2", "--global-batch-size", "2", "--precision", "bf16", "--verify")
    command = [sys.executable, "tools/plan.py", *MODEL, *where, "--json", str(tmp_path / "plan.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified by a dry run on a simulated GPU:\nstage 0 (rank 0, 1 micro-batches): as planned" in (done.stdout)
    stages = json.loads((tmp_path / "plan.json").read_text())["verified"]
    assert stages
    assert [each["agrees"] for each in stages] == [True] * len(stages)
    assert all(each["num_communications"] > 0 for each in stages)


def test_another_program_is_not_verified(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*MODEL, "--gpus", "2", "--global-batch-size", "2", "--verify", "--implementation", "megatron-te")
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--implementation is megatron-te; change it or omit --verify" in line


@pytest.mark.parametrize("parser", [plan.build_parser(), explain_parser(1)], ids=["plan", "explain"])
def test_the_deprecated_name_of_the_implementation_works_with_one_warning(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = parser.parse_known_args(["--implementation", "ours"])
    assert found.implementation == "native"
    said = "WARNING: --implementation ours is now --implementation native; the next release removes the old name\n"
    assert capsys.readouterr().err == said


def test_each_difference_fails_and_is_named() -> None:
    check_agreement([VERIFIED])
    unlike = (("all_reduce over tp", Volume(1, 10), Volume(2, 20)),)
    for other, told in (
        (dataclasses.replace(VERIFIED, parameters=8), "8 parameters, but 7 were planned"),
        (dataclasses.replace(VERIFIED, peak_bytes=7 * GIB), "peak 7168 MiB, planned 6144 (-14.29 %)"),
        (dataclasses.replace(VERIFIED, unlike=unlike), "all_reduce over tp: 2 times, 20 bytes; planned 1 times, 10"),
    ):
        with pytest.raises(MegatronError, match="the dry run differs from the plan on stage 1") as raised:
            check_agreement([VERIFIED, other])
        assert not isinstance(raised.value, InputError)
        text = "\n".join(describe_verified([other]))
        assert "stage 1 (rank 4, 8 of 64 micro-batches): NOT as planned" in text
        assert told in text


def test_a_plan_whose_dry_run_needs_more_memory_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*MODEL, "--global-batch-size", "2", "--micro-batch-size", "1", "--lr", "1e-4", "--mock-data")
    config = read_planned_run((*words, "--train-iters", "5"), 1).config
    large = dataclasses.replace(VERIFIED, peak_bytes=78 * GIB)
    monkeypatch.setattr(planner_arguments, "verify_plan", lambda config, gpu: [large])
    with pytest.raises(
        ConfigurationError,
        match=(
            r"--verify: the dry run of stage 1 needs 84198 MiB, but the GPU has 81559 MiB \(the plan predicted 10470"
        ),
    ):
        verify_fitting_plan(config, H100)


LLAMA_7B = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 --bf16
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --tokenizer-type
    NullTokenizer --vocab-size 31999 --data-path /nowhere/text_document
"""


def test_the_lines_of_a_run_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    assert report_main([*LLAMA_7B.split(), *layout.split(), "--world-size", "8"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Number of parameters in transformer block in billions:  6.48",
        "Number of parameters in embedding layers in billions: 0.26",
        "Total number of parameters in billions: 6.74",
        "Number of parameters in most loaded shard in billions: 1.6847",
        "Number of parameters in other shards in billions: 1.6847",
        "Theoretical memory footprints: weight and optimizer=19279.55 MB",
    ]


def test_wrong_flags_are_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_main([*LLAMA_7B.split(), "--world-size", "0"]) == 2
    assert report_main([*LLAMA_7B.split(), "--tensor-model-parallel-size", "3", "--world-size", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first == "error: --world-size 0 is not positive; pass the number of the run's ranks"
    assert "--num-attention-heads 32" in second
