"""Launch files and command lines of other Megatrons: they run here under the names that their documents print."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from megatron.config.arguments import resolve_arguments
from tests.e2e.toy_run import DATA, newest
from tests.harness.byte_vocabulary import write_vocabulary
from tests.harness.training_run import REPOSITORY, CommandResult, launch_prefix, read_metrics, run_command, run_training
from tests.unit.core.datasets.small_chat import write_chat_folder

EXAMPLES = REPOSITORY / "examples"
SHELL = {
    "pretrain_gpt.sh": (1, 1, 1),
    "pretrain_gpt_distributed.sh": (8, 1, 1),
    "pretrain_gpt_distributed_with_mp.sh": (8, 2, 2),
}
PATCH = ("llama3/pretrain_llama.py", "llama3_1/pretrain_llama.py", "qwen2/pretrain_qwen.py", "qwen3/pretrain_qwen.py")
SMALL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr-decay-iters 3 --log-interval 1 --eval-iters 0
    --initial-loss-scale 4096 --split 1,0,0
"""
SENTENCES = ("The ranks wait for each other.", "A token follows another token.", "Rank 0 tokenizes the text once.")


def run_shell(name: str, folder: Path, starts: dict[str, str], words: str = "", **variables: str) -> CommandResult:
    """Run a shell script of the examples with programs that ``starts`` gives."""
    (folder / "bin").mkdir()
    for program, start in starts.items():
        (folder / "bin" / program).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (folder / "bin" / program).chmod(0o755)
    vocabulary, merges = write_vocabulary(folder)
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "DATA_PATH": str(DATA),
        "VOCAB_FILE": str(vocabulary),
        "MERGE_FILE": str(merges),
        "CHECKPOINT_PATH": str(folder / "saved"),
        "MEGATRON_DEVICE": "cpu",
        **variables,
    }
    return run_command(["bash", EXAMPLES / name, *words.split()], env=environment, timeout_s=300)


def losses(done: CommandResult, folder: Path) -> list[float]:
    done.check()
    lines = [line for line in read_metrics(folder / "saved" / "metrics.jsonl") if "split" not in line]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert newest(folder / "saved").name == "iter_0000003"
    return [line["lm_loss"] for line in lines]


@pytest.mark.default
@pytest.mark.parametrize("name", SHELL)
def test_a_script_of_megatron_is_accepted_at_its_full_size(name: str, tmp_path: Path) -> None:
    prints = f"{shlex.quote(sys.executable)} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    done = run_shell(name, tmp_path, {"python": prints, "torchrun": prints}).check()
    words = json.loads(done.stdout)
    place = next(number for number, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    assert Path(words[place]).samefile(REPOSITORY / "pretrain_gpt.py")
    world_size, tensor, pipeline = SHELL[name]
    assert words[:place][1:2] == ([] if world_size == 1 else [str(world_size)])
    parsed = resolve_arguments(words[place + 1 :], world_size)
    model = parsed.config.model
    assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == (tensor, pipeline)
    assert (model.num_layers, model.fp16, parsed.notes) == (24, True, ())


@pytest.mark.default
def test_the_script_for_one_process_trains(tmp_path: Path) -> None:
    python = {"python": shlex.quote(sys.executable)}
    assert losses(run_shell("pretrain_gpt.sh", tmp_path, python, SMALL), tmp_path)[0] == pytest.approx(5.55, abs=0.3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "processes"), [("pretrain_gpt_distributed.sh", 2), ("pretrain_gpt_distributed_with_mp.sh", 4)]
)
def test_a_script_for_several_processes_trains(name: str, processes: int, tmp_path: Path) -> None:
    torchrun = {"torchrun": shlex.join([sys.executable, "-m", "torch.distributed.run"])}
    port = str(20000 + os.getpid() % 20000)
    losses(run_shell(name, tmp_path, torchrun, SMALL, GPUS_PER_NODE=str(processes), MASTER_PORT=port), tmp_path)


@pytest.mark.parametrize("name", PATCH)
def test_a_launch_file_of_pai_megatron_patch_is_the_training_script(name: str) -> None:
    assert (EXAMPLES / name).read_text().count("\n") < 20
    words = "--model-preset gpt2-345m --micro-batch-size 1 --train-iters 1 --mock-data --print-config"
    shown = [
        run_command([sys.executable, script, *words.split()], cwd=EXAMPLES / Path(name).parent).check().stdout
        for script in (Path(name).name, REPOSITORY / "pretrain_gpt.py")
    ]
    assert shown[0] == shown[1] != ""


def test_a_script_of_pai_megatron_patch_trains_with_the_tokenizer_in_the_load_folder(tmp_path: Path) -> None:
    write_chat_folder(tmp_path / "tokenizer", characters=["é"])
    # From run_mcore_qwen.sh, which starts ../qwen2/pretrain_qwen.py in its own folder.
    words = f"""
        --load {tmp_path / "tokenizer"} --save {tmp_path / "saved"} --train-mode pretrain --data-path {DATA}
        --dataset LLama-Pretrain-Idxmap --patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size 293 --bf16 --swiglu
        --normalization RMSNorm --norm-epsilon 1e-6 --use-rotary-position-embeddings --position-embedding-type rope
        --untie-embeddings-and-output-weights --disable-bias-linear --add-qkv-bias --rotary-percent 1.0
        --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1 --attention-dropout 0.0 --hidden-dropout 0.0
        --n-head-kv 2 --no-query-key-layer-scaling --no-load-optim --no-load-rng --max-padding-length 24
        --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --ffn-hidden-size 64 --transformer-impl transformer_engine
    """
    script = "../qwen2/pretrain_qwen.py"
    command: list[str | Path] = [*launch_prefix(1), script, *words.split(), *SMALL.split()]
    done = run_command(command, cwd=EXAMPLES / "llama3_1")
    losses(done, tmp_path)
    assert "--n-head-kv 2 is read as --num-query-groups 2 --group-query-attention" in done.stdout
    assert f"using the tokenizer of --load {tmp_path / 'tokenizer'}: HuggingFaceTokenizer" in done.stdout


@pytest.mark.default
def test_the_script_of_2020_tokenizes_its_text_once_and_trains(tmp_path: Path) -> None:
    vocabulary, merges = write_vocabulary(tmp_path)
    text = "".join(json.dumps({"text": SENTENCES[number % 3] * 4, "url": str(number)}) + "\n" for number in range(40))
    (tmp_path / "data.json").write_text(text)
    # ds_pretrain_gpt2.sh of DeepSpeedExamples' Megatron-LM, with a small model.
    words = f"""
        --model-parallel-size 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --batch-size 2 --seq-length 24
        --max-position-embeddings 24 --train-iters 3 --resume-dataloader --train-data {tmp_path / "data.json"}
        --lazy-loader --tokenizer-type GPT2BPETokenizer --split 900,50,50 --distributed-backend gloo --lr 0.00015
        --no-load-optim --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01
        --checkpoint-activations --deepspeed-activation-checkpointing --fp16 --cache-dir cache --log-interval 1
        --vocab-file {vocabulary} --merge-file {merges} --save {tmp_path / "saved"} --initial-loss-scale 4096
        --eval-iters 0
    """
    done = run_training(words.split(), nproc=2)
    losses(done, tmp_path)
    for line in (
        "--model-parallel-size 2 is read as --tensor-model-parallel-size 2",
        "--batch-size 2 is read as --micro-batch-size 2",
        "--warmup 0.01 is read as --lr-warmup-fraction 0.01",
        "--lazy-loader has no effect: token files are always memory-mapped",
    ):
        assert done.stdout.splitlines().count(line) == 1, line
    assert done.stdout.count("Tokenizing 1 file(s) with GPT2BPETokenizer") == 1
    (prefix,) = (path.with_suffix("") for path in tmp_path.glob("data-*.bin"))
    assert f"{tmp_path / 'data.json'} is read from {prefix}.bin, tokenized " in done.stdout


def test_a_layout_with_the_symbol_of_multi_token_prediction_trains(tmp_path: Path) -> None:
    words = f"""
        {SMALL} --mtp-num-layers 1 --position-embedding-type rope --data-path {DATA} --lr 1e-3 --seed 7
        --tokenizer-type NullTokenizer --vocab-size 127 --init-method-std 0.06 --distributed-backend gloo
        --hidden-dropout 0 --attention-dropout 0
    """
    layouts = {"named": "Et|t|m|L", "plain": "Et|tL"}
    found = {}
    for name, layout in layouts.items():
        more = ["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", layout]
        folder = tmp_path / name
        done = run_training([*words.split(), *more, "--save", str(folder / "saved")], nproc=2)
        found[name] = losses(done, folder)
        assert ("MTP modules (m) run on the stage of the loss (L)" in done.stdout) == (name == "named")
    assert found["named"] == pytest.approx(found["plain"], rel=1e-6)
