"""Configurations side by side, and how the fastest layout changes with what is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.cli.plan import main
from megatron.planner.simulation.fake_cuda import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="a simulated GPU needs a C++ compiler here")

CONFIG = """
num_layers = 4
hidden_size = 1024
num_attention_heads = 8
seq_length = 1024
max_position_embeddings = 1024
micro_batch_size = 1
global_batch_size = 8
bf16 = true
tokenizer_type = "NullTokenizer"
vocab_size = 1000
lr = 1e-4
train_iters = 10
mock_data = true
"""


def written(folder: Path, name: str, more: str) -> str:
    (folder / name).write_text(CONFIG + more)
    return str(folder / name)


def table_of(text: str) -> dict[str, list[str]]:
    """Return the values of each line of a comparison, and the change as a number."""
    rows = {}
    for line in text.splitlines()[1:]:
        label, *values = [part.strip() for part in line.split("  ") if part.strip()]
        rows[label] = values
    return rows


def test_two_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        written(tmp_path, "tensor.toml", "tensor_model_parallel_size = 2\n"),
        written(tmp_path, "pipeline.toml", "pipeline_model_parallel_size = 2\n"),
    ]
    assert main(["--compare", *files, "--gpus", "2"]) == 0
    output = capsys.readouterr().out
    assert output.split()[:3] == ["tensor", "pipeline", "change"]
    rows = table_of(output)
    assert rows["tp size"] == ["2", "1"]
    assert rows["pp size"] == ["1", "2"]
    assert rows["tokens per step"] == ["8192", "8192"]
    first, last, change = rows["step, ms"]
    assert float(change.removesuffix(" %")) == pytest.approx(100 * (float(last) / float(first) - 1), abs=1.5)
    memory = [
        float(rows[f"{part}, MiB"][0])
        for part in ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    ]
    assert sum(memory) == pytest.approx(float(rows["stage with the highest memory use, total, MiB"][0]), abs=4)


def test_flags_of_the_command_line_are_those_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, "a.toml", ""), written(tmp_path, "b.toml", "tensor_model_parallel_size = 2\n")]
    tables = []
    for more in ([], ["--num-layers", "6"]):
        assert main(["--compare", *files, "--gpus", "2", *more]) == 0
        tables.append(table_of(capsys.readouterr().out)["parameters, billion"])
    four, six = ([float(value) for value in values[:2]] for values in tables)
    assert six[0] > four[0]
    assert six[1] > four[1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "--gpus is missing"),
        (["--gpus", "2", "--top", "3"], "--compare is not supported with --top"),
        (["--gpus", "2", "--sensitivity"], "--compare is not supported with --sensitivity"),
        (["--gpus", "3"], "a.toml: "),
    ],
)
def test_what_cannot_be_compared_is_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], told: str
) -> None:
    files = [written(tmp_path, "a.toml", ""), written(tmp_path, "b.toml", "tensor_model_parallel_size = 2\n")]
    try:
        status = main(["--compare", *files, *more])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_one_file_is_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compare", written(tmp_path, "a.toml", ""), "--gpus", "2"]) == 2
    assert "is one file; pass two or more" in capsys.readouterr().err


@pytest.mark.full
def test_sensitivities_are_of_other_memory_lengths_batches_and_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
        "--global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 1000 --precision bf16 --gpus 2"
    )
    assert main([*words.split(), "--sensitivity", "--json", str(tmp_path / "plan.json")]) == 0
    table = capsys.readouterr().out.split("changed ")[1].splitlines()[1:]
    names = [line.partition("  ")[0] for line in table]
    assert names[0] == "as configured"
    assert "sequence length 512" in names
    assert "global batch size 2" in names
    assert "GPUs 4" in names
    assert sum(name.startswith("GPU memory") for name in names) == 3
    speeds = {name: float(line.removeprefix(name).split()[1]) for name, line in zip(names, table)}
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [each["changed"] for each in written["sensitivities"]] == names
    assert written["sensitivities"][0]["choice"] == {
        name: value for name, value in written["ranked"][0].items() if name in written["sensitivities"][0]["choice"]
    }
    assert speeds["GPUs 1"] < speeds["as configured"] < speeds["GPUs 4"]
