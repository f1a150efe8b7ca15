"""The scripts that users launch run as they stand, with a small model substituted at the end, and save."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.checkpoint.stored_checkpoint import open_checkpoint
from tests.e2e.megatron_lines import parse
from tests.e2e.toy_run import leftovers, newest
from tests.harness.training_run import REPOSITORY, CommandResult, read_metrics, run_command

SHARED = REPOSITORY.parent / "shared"
SCRIPTS = SHARED / "user_scripts"
DATA = SHARED / "data"
pytestmark = pytest.mark.skipif(
    not (SCRIPTS.is_dir() and DATA.is_dir()),
    reason="the users' scripts and GPT-2's vocabulary are not beside the repository (../shared)",
)

SMALL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --train-iters 6 --log-interval 2 --eval-interval 4 --eval-iters 1 --save-interval 3 --global-batch-size 4
    --micro-batch-size 1 --initial-loss-scale 4096
"""
DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
ITERATION = re.compile(
    rf"^ \[{DATE}\] iteration +(\d+)/ +6 \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): \d+\.\d \| "
    r"learning rate: \d\.\d{6}E[+-]\d\d \| global batch size: +4 \| lm loss: \d\.\d{6}E\+\d\d \| "
    r"loss scale: \d+\.\d \| grad norm: \d+\.\d{3} \| number of skipped iterations: +\d+ \| "
    r"number of nan iterations: +0 \|$",
    re.MULTILINE,
)


def line(pattern: str) -> re.Pattern[str]:
    return re.compile(f"^{pattern}$", re.MULTILINE)


def expected_lines(num_processes: int, dp: int, tp: int, pp: int, folder: Path) -> list[re.Pattern[str]]:
    """Return the lines that scripts written for Megatron look for in a first run's log."""
    checkpoints = re.escape(str(folder))
    padded = -(-50257 // (128 * tp)) * 128 * tp
    patterns = [
        rf"using world size: {num_processes}, data-parallel size: {dp}, context-parallel size: 1, "
        rf"tensor-model-parallel size: {tp}, pipeline-model-parallel size: {pp}",
        r"------------------------ arguments ------------------------",
        r"  adam_beta1 \.{38} 0\.9",
        rf"  num_layers \.{{38}} {max(pp, 2)}",
        r"-------------------- end of arguments ---------------------",
        rf" > padded vocab \(size: 50257\) with {padded - 50257} dummy tokens \(new size: {padded}\)",
        rf"> initialized tensor model parallel with size {tp}",
        rf"> initialized pipeline model parallel with size {pp}",
        r"> setting random seeds to 1234 \.\.\.",
        rf"WARNING: could not find the metadata file {checkpoints}/latest_checkpointed_iteration\.txt",
        r"    will not load any checkpoints and will start from random",
        r"\(min, max\) time across ranks \(ms\):",
        r"    load-checkpoint \.{32}: \(\d+\.\d\d, \d+\.\d\d\)",
        r" > datasets target sizes \(minimum size\):",
        r"    train:      24",
        r"    validation: 8",
        r"    test:       4",
        rf"\[before the start of training step\] datetime: {DATE}",
        r"\[Rank 0\] \(after 2 iterations\) memory \(MB\) \| allocated: \d+\.\d\d \| max allocated: \d+\.\d\d \| "
        r"reserved: \d+\.\d \| max reserved: \d+\.\d",
        r" validation loss at iteration 4 on validation set \| lm loss value: \d\.\d{6}E\+\d\d \| "
        r"lm loss PPL: \d\.\d{6}E\+\d\d \|",
        rf"saving checkpoint at iteration       3 to {checkpoints}",
        rf"  successfully saved checkpoint at iteration       3 to {checkpoints}",
        rf"  successfully saved checkpoint at iteration       6 to {checkpoints}",
    ]
    patterns += [
        rf" > number of parameters on \(tensor, pipeline\) model parallel rank \({rank}, {stage}\): \d+"
        for stage in range(pp)
        for rank in range(tp)
    ]
    return [line(pattern) for pattern in patterns]


def run_script(script: str, folder: Path, *more: str, **variables: Path) -> CommandResult:
    """Run a user's script in a folder that holds links to the project, on the machine's CPU."""
    for name in ("pretrain_gpt.py", "tools", "megatron"):
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "VOCAB_FILE": str(DATA / "gpt2-vocab.json"),
        "MERGE_FILE": str(DATA / "gpt2-merges.txt"),
        "MEGATRON_DEVICE": "cpu",
        **{name: str(path) for name, path in variables.items()},
    }
    return run_command(["bash", SCRIPTS / script, *more], env=environment, cwd=folder, timeout_s=600.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preprocess a part of WikiText-2 with the users' script; return the prefix of its files."""
    folder = tmp_path_factory.mktemp("preprocess")
    with (DATA / "wikitext2.jsonl").open("rb") as whole:
        (folder / "part.jsonl").write_bytes(b"".join(whole.readline() for _ in range(40)))
    run_script("preprocess.sh", folder, INPUT=folder / "part.jsonl", PREFIX=folder / "my-gpt2").check()
    assert (folder / "my-gpt2_text_document.idx").is_file()
    return folder / "my-gpt2_text_document"


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("script", "num_processes", "dp", "tp", "pp"),
    [
        ("gpt2_345m.sh", 1, 1, 1, 1),
        pytest.param("gpt2_345m_dp4.sh", 4, 4, 1, 1, marks=LONG),
        pytest.param("gpt2_345m_tp4.sh", 4, 1, 4, 1, marks=LONG),
        pytest.param("gpt2_345m_tp4_sp.sh", 4, 1, 4, 1, marks=LONG),
        pytest.param("gpt2_345m_tp2_dp2.sh", 4, 2, 2, 1, marks=LONG),
        pytest.param("gpt2_345m_tp2_pp2.sh", 4, 1, 2, 2, marks=LONG),
        pytest.param("gpt2_345m_pp4.sh", 4, 1, 1, 4, marks=LONG),
        pytest.param("gpt2_345m_tp2_pp3_zero1.sh", 6, 1, 2, 3, marks=LONG),
    ],
)
def test_script_trains_saves_and_resumes(
    script: str, num_processes: int, dp: int, tp: int, pp: int, text: Path, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    small = [*SMALL.split(), "--num-layers", str(max(pp, 2))]
    run = run_script(script, tmp_path, *small, DATA_PATH=text, CHECKPOINT_PATH=checkpoints).check()
    missing = [
        pattern.pattern
        for pattern in expected_lines(num_processes, dp, tp, pp, checkpoints)
        if not pattern.search(run.stdout)
    ]
    assert not missing, run.stdout
    parse(run.stdout)
    lines = ITERATION.findall(run.stdout)
    assert lines == [("1", "4"), ("2", "8"), ("4", "16"), ("6", "24")], run.stdout
    assert "Traceback" not in run.stderr
    assert newest(checkpoints).name == "iter_0000006"
    assert leftovers(checkpoints) == []
    is_torch = "--ckpt-format torch" in (SCRIPTS / script).read_text()
    assert (newest(checkpoints) / "index.json").exists() != is_torch
    stored = open_checkpoint(newest(checkpoints), vocab_size=50257)
    assert stored.tensors["model.embedding.word_embeddings.weight"].global_shape == (50257, 32)
    stored.close()
    if num_processes == 1:
        return
    longer = [*small, "--train-iters", "8"]
    resumed = run_script(script, tmp_path, *longer, DATA_PATH=text, CHECKPOINT_PATH=checkpoints).check()
    assert "at iteration 6" in resumed.stdout
    iterations = [record for record in read_metrics(checkpoints / "metrics.jsonl") if "split" not in record]
    assert [record["iteration"] for record in iterations] == list(range(1, 9))


@pytest.mark.long
def test_domains_script_reports_every_validation_set(text: Path, tmp_path: Path) -> None:
    names = ("c4_en", "dolma_books", "wikitext_103")
    for name in names:
        (tmp_path / f"valid-datalist-{name}").write_text(f"31415926 {text}\n")
    # One percent of 40 documents is none.
    small = [*SMALL.split(), "--ffn-hidden-size", "48", "--lr-warmup-iters", "1", "--split", "38,2,0"]
    small += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(DATA / "gpt2-vocab.json")]
    small += ["--merge-file", str(DATA / "gpt2-merges.txt")]
    environment = {"DATASET": text, "OUTPUT_DIR": tmp_path / "output", "GPUS_PER_NODE": Path("2")}
    run = run_script("llama_7b_domains.sh", tmp_path, *small, **environment).check()
    parse(run.stdout)
    records = read_metrics(tmp_path / "output" / "checkpoints" / "metrics.jsonl")
    evaluated = [(record["iteration"], record["split"]) for record in records if "split" in record]
    assert evaluated == [(iteration, name) for iteration in (4, 6) for name in ("validation", *names)]
    board = EventAccumulator(str(tmp_path / "output" / "tf_logs"))
    board.Reload()
    for name in names:
        assert len(board.Scalars(f"lm loss {name}")) == len(board.Scalars(f"lm loss {name} ppl vs samples")) == 2
        assert re.search(rf" validation loss at iteration 4 on validation set {name} \| lm loss value: ", run.stdout)
