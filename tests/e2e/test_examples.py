"""The examples: accepted at their full size, and run scaled down."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.native import NativeSource
from megatron.config.arguments import resolve_arguments
from tests.e2e.toy_run import DATA, newest
from tests.harness.forked_training import fork_training
from tests.harness.training_run import REPOSITORY, CommandResult, read_metrics, run_command
from tests.unit.core.datasets.conversations.small_chat import write_chat_folder, write_lines

EXAMPLES = REPOSITORY / "examples"
PRETRAINING = {"gpt2_345m.sh": 50304, "llama3_8b.sh": 128256, "mixture_of_experts.sh": 50304}
BATCH = "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr-warmup-iters 1 --log-interval 1 --eval-iters 0"
SMALL = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 24
    --max-position-embeddings 24 --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8
    --split 1,0,0 {BATCH}
"""
MORE = {
    "gpt2_345m.sh": "",
    "llama3_8b.sh": "--num-query-groups 2",
    "mixture_of_experts.sh": "--expert-model-parallel-size 2",
}


def commands(folder: Path, *, recorded: bool = False) -> Path:
    """Make a folder for PATH with `megatron` and `torchrun`, or with a `megatron` that prints its words as JSON."""
    folder.mkdir()
    python = shlex.quote(sys.executable)
    starts = {"megatron": f"{python} -m megatron", "torchrun": f"{python} -m torch.distributed.run"}
    starts["python"] = python
    if recorded:
        starts = {"megatron": f"{python} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"}
    for name, start in starts.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def run_example(name: str, folder: Path, words: str = "", *, recorded: bool = False, **more: Any) -> CommandResult:
    """Run an example with the data of the tests; what it saves is in ``folder``."""
    path = f"{commands(folder / 'bin', recorded=recorded)}{os.pathsep}{os.environ['PATH']}"
    values: dict[str, Any] = {
        "DATA": DATA,
        "VOCAB": folder / "vocab.json",
        "MERGES": folder / "merges.txt",
        "SAVE": folder / "saved",
    }
    values |= {"MODEL": folder / "model", "TOKENIZER": folder / "model", "TRAIN": folder / "train.jsonl"}
    values |= {"EXPORTED": folder / "exported", "PATH": path, "MEGATRON_DEVICE": "cpu", **more}
    environment = {key: str(value) for key, value in values.items()}
    return run_command(["bash", EXAMPLES / name, *words.split()], env=environment, timeout_s=300)


def words_of(name: str, folder: Path) -> tuple[int, list[str]]:
    """Return the number of processes and the flags of the training that an example starts."""
    first = run_example(name, folder, recorded=True).check().stdout.splitlines()[0]
    train, nproc, count, *words = json.loads(first)
    assert (train, nproc) == ("train", "--nproc")
    return int(count), words


@pytest.mark.parametrize("name", PRETRAINING)
def test_an_example_is_accepted_at_its_full_size(name: str, tmp_path: Path) -> None:
    count, words = words_of(name, tmp_path)
    config = resolve_arguments(words, count, needs_files=False).config
    assert count == 8
    assert config.model.bf16


def test_an_example_without_its_data_says_what_is_missing(tmp_path: Path) -> None:
    done = run_example("gpt2_345m.sh", tmp_path, recorded=True, DATA="")
    assert done.returncode != 0
    assert "DATA: the prefix of token files" in done.stderr


def check_run(done: CommandResult, folder: Path) -> list[float]:
    done.check()
    lines = [line for line in read_metrics(folder / "saved" / "metrics.jsonl") if "split" not in line]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert newest(folder / "saved").name == "iter_0000003"
    return [line["lm_loss"] for line in lines]


def check_small_example(name: str, folder: Path) -> None:
    losses = check_run(run_example(name, folder, f"{SMALL} {MORE[name]}", NPROC=2), folder)
    assert abs(losses[0] - math.log(128)) < 0.2, "the first loss is that of a uniform guess"


@pytest.mark.long
def test_the_example_of_gpt2_runs(tmp_path: Path) -> None:
    check_small_example("gpt2_345m.sh", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PRETRAINING if name != "gpt2_345m.sh"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    check_small_example(name, tmp_path)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Qwen2 model in Hugging Face's format, with a chat template, and conversations."""
    folder = tmp_path_factory.mktemp("qwen")
    write_chat_folder(folder / "tokenizer", characters=["é"])
    write_lines(folder / "train.jsonl", [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(40)])
    words = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --position-embedding-type rope
        --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias --hidden-dropout 0 --attention-dropout 0
        --group-query-attention --num-query-groups 2 --ffn-hidden-size 64 --make-vocab-size-divisible-by 8
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder / "tokenizer"} --lr 1e-3 --mock-data
        --distributed-backend gloo --lr-decay-style constant {BATCH} --save {folder / "first"}"""
    fork_training(words.split()).check()
    source = NativeSource(newest(folder / "first"))
    write_hugging_face(source, folder / "model")
    source.close()
    return folder


@pytest.mark.long
def test_the_example_of_qwen_goes_on_with_a_model_and_resumes(chat: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"MODEL": chat / "model", "ROWS": 136, "NPROC": 2}
    (tmp_path / "first").mkdir()
    words = f"--seq-length 24 --split 1,0,0 {BATCH} --lr-decay-iters 3 --train-iters"
    run_example("qwen2.5_7b.sh", tmp_path / "first", f"{words} 2", SAVE=tmp_path / "saved", **more).check()
    (tmp_path / "second").mkdir()
    done = run_example("qwen2.5_7b.sh", tmp_path / "second", f"{words} 3", SAVE=tmp_path / "saved", **more)
    check_run(done, tmp_path)


@pytest.mark.long
def test_the_example_of_fine_tuning_gives_the_model_back(chat: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"MODEL": chat / "model", "TRAIN": chat / "train.jsonl", "ROWS": 136, "NPROC": 2}
    words = "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --train-iters 3"
    check_run(run_example("fine_tuning.sh", tmp_path, words, **more), tmp_path)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (chat / "model", tmp_path / "exported")
    )
    assert after["architectures"] == before["architectures"] == ["Qwen2ForCausalLM"]
    assert (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.long
def test_the_slurm_script_starts_one_task_a_machine(tmp_path: Path) -> None:
    """Two machines are two tasks here: stand-ins for `srun` and `scontrol` do what SLURM's do."""
    tools = tmp_path / "bin"
    commands(tools)
    (tools / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n")
    (tools / "srun").write_text(
        '#!/bin/bash\nset -e\nshift\nSLURM_NODEID=0 "$@" & first=$!\nSLURM_NODEID=1 "$@" & second=$!\n'
        "wait $first\nwait $second\n"
    )
    for name in ("scontrol", "srun"):
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "DATA": str(DATA), "NPROC": "1"}
    environment |= {"VOCAB": "vocab.json", "MERGES": "merges.txt", "SAVE": str(tmp_path / "saved")}
    environment |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "a[1-2]"}
    words: list[str | Path] = ["bash", EXAMPLES / "slurm.sbatch", EXAMPLES / "gpt2_345m.sh", *SMALL.split()]
    check_run(run_command(words, env=environment | {"MEGATRON_DEVICE": "cpu"}, timeout_s=300), tmp_path)
    record = (tmp_path / "saved" / "run_record" / "starts.jsonl").read_text()
    assert '"world_size": 2' in record or '"processes": 2' in record


def train_job() -> dict[str, Any]:
    job = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer: dict[str, Any] = job["spec"]["trainer"]
    return trainer


def test_the_train_job_asks_for_flags_that_are_accepted() -> None:
    trainer = train_job()
    launcher, script, *rest = trainer["command"]
    assert (launcher, script, rest) == ("torchrun", "pretrain_gpt.py", [])
    words = [str(word) for word in trainer["args"]]
    world = trainer["numNodes"] * int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    config = resolve_arguments(words, world, needs_files=False).config
    assert config.model.bf16
    assert world == 16


@pytest.mark.long
def test_the_train_job_runs_with_what_its_runtime_sets(tmp_path: Path) -> None:
    trainer = train_job()
    words = [*trainer["command"], *trainer["args"], *SMALL.split(), "--data-path", DATA, "--save", tmp_path / "saved"]
    words += ["--load", tmp_path / "saved"]
    environment = {"PATH": f"{commands(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}", "MEGATRON_DEVICE": "cpu"}
    environment |= {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    environment |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(20000 + os.getpid() % 20000)}
    check_run(run_command(words, env=environment, timeout_s=300), tmp_path)


def test_the_image_copies_what_is_there_and_installs_extras_that_exist() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (\S+) ", text, flags=re.MULTILINE):
        assert (REPOSITORY / source).exists()
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", text)
    project = (REPOSITORY / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE), extra


def test_the_table_of_examples_is_whole_and_scripts_parse() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".sh", ".sbatch", ".yaml") or path.name in ("Dockerfile", "own_training_loop.py"):
            assert f"({path.name})" in table, path.name
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sbatch"], check=True)
