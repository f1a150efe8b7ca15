"""The examples, the quickstart, the tutorials and the scripts run as their pages say, scaled down."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.native import NativeSource
from megatron.cli import preprocess_data, text_generation_cli
from megatron.config.arguments import resolve_arguments
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from tests.e2e.test_text_generation import call_tool
from tests.e2e.toy_run import DATA, newest, toy_args
from tests.harness.distributed import run_distributed
from tests.harness.forked_training import fork_training
from tests.harness.training_run import REPOSITORY, CommandResult, launch_prefix, read_metrics, run_command
from tests.unit.core.datasets.small_chat import write_chat_folder, write_lines

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
        if path.suffix in (".sh", ".sbatch", ".yaml") or path.name == "Dockerfile" or path.name.endswith("_loop.py"):
            assert f"({path.name})" in table, path.name
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sbatch"], check=True)


EXAMPLE = REPOSITORY / "examples" / "own_training_loop.py"
ITERATIONS = 6


def load_example(path: Path = EXAMPLE) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(tp: int, dtype: torch.dtype) -> list[float]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    state = create_parallel_state(ParallelSizes(tp=min(tp, world_size)))
    given: list[float] = load_example().train(state, EXAMPLE.read_bytes(), ITERATIONS, "cpu", dtype)
    return given


@pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (2, 1), (4, 2)])
def test_losses_are_those_of_one_process(world_size: int, tp: int) -> None:
    alone = losses(1, torch.float64)
    assert alone[-1] < alone[0] - 0.5
    for given in run_distributed(world_size, losses, tp, torch.float64, timeout_s=60.0):
        assert given == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("nproc", [pytest.param(nproc, marks=pytest.mark.long) for nproc in (1, 2)])
def test_the_command_prints_the_losses_of_one_process(nproc: int) -> None:
    words = ("--tensor-model-parallel-size", str(nproc), "--iterations", str(ITERATIONS))
    result = run_command([*launch_prefix(nproc), EXAMPLE, *words], env={"CUDA_VISIBLE_DEVICES": ""}).check()
    printed = [float(loss) for loss in re.findall(r"^iteration \d+: loss (\S+)$", result.stdout, re.M)]
    assert printed == pytest.approx(losses(1, torch.float32), rel=1e-5)


MEGATRON_CORE_EXAMPLE = REPOSITORY / "examples" / "megatron_core_loop.py"
MEGATRON_CORE_LOSSES = {
    (1, 1): [5.54636812210083, 5.291918754577637, 5.1189069747924805, 4.978184223175049, 4.855175971984863],
    (2, 2): [5.54636812210083, 5.291918754577637, 5.1189069747924805, 4.978184223175049, 4.855175971984863],
    (4, 2): [5.546368598937988, 5.291918754577637, 5.1189069747924805, 4.978183746337891, 4.855175971984863],
}
"""Losses by number of processes and tensor-parallel size of megatron-core 0.16.1 itself: this file's ``train`` with the
text below, in an environment with megatron-core instead of this package, with torch 2.13.0 on CPU (gloo)."""


def losses_with_megatron_core_names(tp: int) -> list[float]:
    text = b"the cat sat on the mat; a dog ran on the mat. " * 8
    given: list[float] = load_example(MEGATRON_CORE_EXAMPLE).train(text, 5, tp, "cpu")
    return given


@pytest.mark.default(2)
@pytest.mark.parametrize(("world_size", "tp"), MEGATRON_CORE_LOSSES)
def test_a_loop_for_megatron_core_has_the_losses_of_megatron_core(world_size: int, tp: int) -> None:
    for given in run_distributed(world_size, losses_with_megatron_core_names, tp, timeout_s=60.0):
        assert given == pytest.approx(MEGATRON_CORE_LOSSES[world_size, tp], abs=1e-6)


def test_a_loop_for_megatron_core_starts_as_a_command() -> None:
    words = ("--tensor-model-parallel-size", "2", "--iterations", "2")
    result = run_command([*launch_prefix(2), MEGATRON_CORE_EXAMPLE, *words], env={"CUDA_VISIBLE_DEVICES": ""}).check()
    assert len(re.findall(r"^iteration \d+: loss \d\.\d+$", result.stdout, re.M)) == 2


QUICKSTART = REPOSITORY / "examples" / "quickstart.sh"


def environment(folder: Path, pip: str) -> Path:
    """Make what looks like a virtual environment of this interpreter, in which pip does something else."""
    (folder / "bin").mkdir(parents=True)
    script = f'#!/bin/sh\nif [ "$2" = pip ]; then {pip}; fi\nexec {shlex.quote(sys.executable)} "$@"\n'
    (folder / "bin" / "python").write_text(script)
    (folder / "bin" / "python").chmod(0o755)
    return folder


def test_a_failed_installation_ends_it_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "echo no index is reachable >&2; exit 3")
    # The output is a pipe that is read to its end: a process left behind would hold it open.
    done = run_command(
        ["bash", QUICKSTART], env={"VENV": str(venv), "RUN": str(tmp_path / "run"), "PYTHON": sys.executable}
    )
    assert done.returncode == 3
    assert done.stdout.startswith("\n== 1/6 environment: ")
    assert "no index is reachable" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.default
def test_its_steps_with_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    counted = [" ".join(str(number + place) for place in range(27)) for number in range(100)]
    text = "".join(f'{{"text": "{line}"}}\n' for line in counted)
    (tmp_path / "text.jsonl").write_text(text)
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 127"
    words = ["--input", f"{tmp_path}/text.jsonl", "--output-prefix", f"{tmp_path}/text", "--append-eod"]
    assert preprocess_data.main([*words, *tokenizer.split(), "--workers", "1"]) == 0
    run = [*toy_args(tmp_path, data=False), "--data-path", f"{tmp_path}/text_text_document", "--train-iters", "30"]
    run += ["--tensor-model-parallel-size", "2", "--save-interval", "30", "--split", "90,5,5", "--lr", "1e-2"]
    stopped = fork_training([*run, "--exit-interval", "10"], 2).check()
    assert len(stopped.iterations()) == 10
    resumed = fork_training(run, 2).check()
    losses = resumed.losses()
    assert len(losses) == 30
    assert losses[-1] < 0.8 * losses[0]
    assert newest(tmp_path / "checkpoints").name == "iter_0000030"
    words = ["--load", str(tmp_path / "checkpoints"), "--prompt", "5 6", "--tokens-to-generate", "4", "--greedy"]
    status, generated, _ = call_tool(monkeypatch, capsys, *words, tool=text_generation_cli)
    assert status == 0
    assert generated.splitlines()[-1].startswith("5 6 ")


@pytest.mark.long
def test_it_shows_that_it_works_and_ends_with_text(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "sleep 6; exit 0")
    values = {"VENV": str(venv), "RUN": str(tmp_path / "run"), "PYTHON": sys.executable, "ITERATIONS": "100"}
    done = run_command(["bash", QUICKSTART], env={**values, "MEGATRON_DEVICE": "cpu"}, timeout_s=600).check()
    steps = re.split(r"\n== (?=\d/6|done)", done.stdout)[1:]
    assert [step.split()[0] for step in steps] == ["1/6", "2/6", "3/6", "4/6", "5/6", "6/6", "done"]
    # Two calls of pip are twelve silent seconds.
    assert re.search(r"\n   \.\.\. 10 s, \d+ MB in ", steps[0])
    (last,) = re.findall(r"^ iteration      100/     100 .*$", steps[4], re.M)
    assert [part.split(":")[0] for part in last.split(" | ")[1:]] == ["learning rate", "lm loss", "grad norm"]
    assert " | consumed samples: " in (tmp_path / "run" / "training.log").read_text()
    assert "Return the number of" in steps[5]
    assert "training loss: " in steps[6]
    assert str(tmp_path / "run") in steps[6]
    page = (tmp_path / "run" / "quickstart.html").read_text(encoding="utf-8")
    assert "Training loss" in page
    assert '<p class="sample"><b>Return the number of</b>' in page


TUTORIALS = REPOSITORY / "docs" / "tutorials"

# SLURM's commands on one machine: a job runs until it has ended, each of its machines is a process.
SLURM = {
    "sbatch": """#!/bin/bash
set -e
nodes=
while [[ "$1" == --* ]]; do
    if [[ "$1" == --nodes=* ]]; then nodes=${1#--nodes=}; fi
    shift
done
asked() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
script=$1
shift
export SLURM_NNODES=${nodes:-$(asked nodes)} SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=machines
output=$(asked output)
bash "$script" "$@" > "${output/\\%j/$SLURM_JOB_ID}" 2>&1
""",
    "scontrol": "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n",
    "srun": """#!/bin/bash
[[ "$1" == --kill-on-bad-exit=1 ]] && shift
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & ranks+=($!); done
for rank in "${ranks[@]}"; do wait "$rank" || exit $?; done
""",
}


def run_tutorial(name: str, folder: Path) -> CommandResult:
    """Run the blocks of a page in a folder that looks like the repository's root."""
    blocks = re.findall(r"```bash\n(.*?)```", (TUTORIALS / f"{name}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for part in ("examples", "docs", "tools", "pretrain_gpt.py"):
        (folder / part).symlink_to(REPOSITORY / part)
    tools = commands(folder / "bin")
    for name, text in SLURM.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = folder / "blocks.sh"
    script.write_text("set -eo pipefail\n" + "\n".join(blocks), encoding="utf-8")
    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    environment |= {"MEGATRON_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    return run_command(["bash", script], env=environment, timeout_s=500, cwd=folder).check()


@pytest.mark.long
def test_the_first_model_learns_resumes_and_writes(tmp_path: Path) -> None:
    done = run_tutorial("first_model", tmp_path)
    lines = [line for line in read_metrics(tmp_path / "tutorial/model/metrics.jsonl") if "split" not in line]
    assert [line["iteration"] for line in lines] == list(range(1, 201))
    assert lines[0]["lm_loss"] == pytest.approx(5.55, abs=0.1)
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"] - 1
    assert "The statement " in done.stdout[-2000:]


@pytest.mark.long
def test_a_megatron_script_is_read_run_and_its_checkpoint_converted(tmp_path: Path) -> None:
    done = run_tutorial("from_a_megatron_script", tmp_path)
    assert "--tensor-model-parallel-size 2" in done.stdout
    assert "iteration        6/       6" in done.stdout
    assert (tmp_path / "tutorial/for_megatron/latest_checkpointed_iteration.txt").is_file()


@pytest.mark.long
def test_a_hugging_face_model_is_trained_on_and_given_back(tmp_path: Path) -> None:
    done = run_tutorial("continue_a_hugging_face_model", tmp_path)
    losses = [line["lm_loss"] for line in read_metrics(tmp_path / "tutorial/continued/metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.3
    before, after = (
        json.loads((tmp_path / "tutorial" / name / "config.json").read_text()) for name in ("llama", "given_back")
    )
    assert after["architectures"] == before["architectures"]
    assert done.stdout.splitlines()[-1].startswith("The rooms")


@pytest.mark.long
def test_a_job_of_two_machines_resumes_and_goes_on_with_one(tmp_path: Path) -> None:
    run_tutorial("../multi_node", tmp_path)
    lines = [
        line["iteration"] for line in read_metrics(tmp_path / "tutorial/slurm/metrics.jsonl") if "split" not in line
    ]
    assert lines == list(range(1, 13))
    starts = (tmp_path / "tutorial/slurm/run_record/starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["world_size"] for line in starts] == [2, 2, 1]
    logs = sorted((tmp_path / "tutorial").glob("job-*.log"), key=lambda path: path.stat().st_mtime)
    assert [sorted(set(re.findall(r" iteration +(\d+)/", log.read_text())), key=int) for log in logs] == [
        ["1", "2", "3", "4"],
        ["5", "6", "7", "8"],
        ["9", "10", "11", "12"],
    ]


@pytest.mark.long
def test_the_slow_rank_and_the_line_where_it_hangs_are_found(tmp_path: Path) -> None:
    done = run_tutorial("../hangs", tmp_path)
    stragglers = [line for line in done.stdout.splitlines() if line.startswith(" stragglers |")]
    assert " rank 1 takes " in stragglers[-1]
    assert " most at forward (" in stragglers[-1]
    assert "forward-compute" in done.stdout
    assert "rank1.iterations5-6.pt.trace.json" in done.stdout
    assert done.stdout.count("rank 1 |") == 2
    (hang,) = [line for line in done.stdout.splitlines() if line.startswith("HANG: rank ")]
    assert hang.startswith("HANG: rank 1 on ")
    assert "the run ended with status 1" in done.stdout
    assert re.search(r"^\d+:.*faulty\.py", done.stdout, re.MULTILINE)
    assert (tmp_path / "tutorial/hang.svg").read_text().startswith("<svg")


SCRIPT = REPOSITORY / "benchmarks" / "real_345m" / "run.py"


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read under /proc")
def test_the_whole_life_of_a_toy_is_run_and_reported(tmp_path: Path) -> None:
    words = ("--toy", "--seq-length", "64", "--folder", tmp_path / "run", "--output", tmp_path / "result")
    run_command([sys.executable, SCRIPT, *words], timeout_s=600.0).check()
    result = json.loads((tmp_path / "result.json").read_text())
    first, second, converted, generated = result["phases"]
    for phase in (first, second):
        assert sorted(phase["peak_mib"]) == [f"rank {rank}" for rank in range(4)]
        assert min(phase["peak_mib"].values()) > 50
        assert phase["figures"]["checkpoint_files"] == 4
    assert second["figures"]["loss"] < first["figures"]["loss"]
    assert converted["figures"]["checkpoint_files"] == 1
    assert len(generated["figures"]["text"].split()) == 6 + 20
    assert (tmp_path / "result.md").read_text().count("\n| ") == 5
