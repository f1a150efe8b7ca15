"""Text from checkpoints of every format by tools/text_generation_cli.py, as its users run it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.megatron.torch_dist_writer import write_torch_dist
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from megatron.checkpoint.formats.native import NativeSource
from megatron.checkpoint.save import CommonState
from megatron.checkpoint.train_state import TrainProgress
from megatron.cli import text_generation_cli
from megatron.config.arguments import parse_arguments
from megatron.config.run_config import RunConfig
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.inference.engine import generate
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import create_parallel_state, describe_parallel_state
from megatron.core.process_group import Group, single_rank_group
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_record import record_tokenizer
from tests.harness.distributed import run_distributed
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training
from tests.harness.saved_checkpoint import save_checkpoint
from tests.harness.training_run import CommandResult, launch_prefix, run_command
from tests.unit.core.inference.small_models import build

TOOL = Path(__file__).resolve().parents[2] / "tools" / "text_generation_cli.py"
GPT2_SHAPE = "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --max-position-embeddings 40 --seq-length 40"
LLAMA_SHAPE = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 44 --swiglu --normalization RMSNorm --disable-bias-linear --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --untie-embeddings-and-output-weights"
)
TRAINING = "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --init-method-std 0.3 --seed 77"
GREEDY = SamplingConfig(greedy=True)
NULL_TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 99"


def run_config(flags: str, world_size: int = 1) -> tuple[RunConfig, Tokenizer]:
    """Return the configuration and the tokenizer that a training run with these flags has."""
    data = "" if "data-path" in flags else " --mock-data"
    config = parse_arguments(f"{flags} {TRAINING}{data}".split(), world_size)
    tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    return dataclasses.replace(config, model=model), tokenizer


def save(folder: Path, flags: str, iteration: int = 10, seed: int = 77, with_tokenizer: bool = True) -> None:
    """Save an untrained model as a training run saves its own, on one rank or on every rank of a job."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config, tokenizer = run_config(flags, world_size)
    state = create_parallel_state(config.parallel_sizes)
    models = [build(config.model, state.tp, seed, contents) for contents in config.stage_layout.chunks(state.pp.rank)]
    common = CommonState(
        progress=TrainProgress(iteration=iteration),
        config=config.to_dict(),
        write_tokenizer=(lambda copies: _record(tokenizer, copies)) if with_tokenizer else None,
    )
    save_checkpoint(folder, CheckpointState(models=models), common, state, config.checkpoint, lambda line: None)


def _record(tokenizer: Tokenizer, copies: Path) -> None:
    record_tokenizer(tokenizer, copies.parent)


def expected_text(flags: str, prompt: str, count: int, sampling: SamplingConfig = GREEDY, seed: int = 77) -> str:
    """Generate in this process, from the model as it was made and not from a checkpoint."""
    config, tokenizer = run_config(flags)
    tp: Group = single_rank_group()
    ids = tokenizer.tokenize(prompt)
    model = build(dataclasses.replace(config.model, sequence_parallel=False), tp, seed=seed)
    (new,) = generate(model, [ids], count, sampling, tokenizer.eod_id, describe_parallel_state(0, 1))
    return tokenizer.detokenize([*ids, *new])


def run_tool(*words: str | Path, nproc: int = 1) -> CommandResult:
    return run_command([*launch_prefix(nproc), TOOL, *words], env={"MEGATRON_DEVICE": "cpu"})


def call_tool(monkeypatch, capsys, *words: str | Path, tool: ModuleType = text_generation_cli) -> tuple[int, str, str]:
    """Run a tool in this process and return status, output and error output."""
    monkeypatch.setattr(sys, "argv", [str(tool.__file__), *map(str, words)])
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    try:
        status = tool.main()
    except SystemExit as ending:
        status = int(ending.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A checkpoint that one process saved, and an older one of other weights."""
    folder = tmp_path_factory.mktemp("llama")
    save(folder, f"{LLAMA_SHAPE} {NULL_TOKENIZER}", iteration=5, seed=78)
    save(folder, f"{LLAMA_SHAPE} {NULL_TOKENIZER}")
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A checkpoint of a byte-level tokenizer whose own files are gone, with learned positions."""
    folder = tmp_path_factory.mktemp("gpt2")
    save(folder / "checkpoints", f"{GPT2_SHAPE} {byte_level_flags(folder)}")
    for file in ("vocab.json", "merges.txt"):
        (folder / file).rename(folder / f"moved-{file}")
    return folder / "checkpoints"


def byte_level_flags(folder: Path, merges: Sequence[str] = ("h e", "l l", "he ll", "hell o")) -> str:
    """Write a vocabulary of bytes, merges and the end of the text where there is none; return its flags."""
    tokens = [*byte_characters(), *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"


@pytest.mark.default
def test_one_process_prints_the_prompt_and_what_follows(llama: Path) -> None:
    result = run_tool("--load", llama, "--prompt", "3 14 15", "--tokens-to-generate", "9", "--greedy").check()
    assert result.stdout == expected_text(f"{LLAMA_SHAPE} {NULL_TOKENIZER}", "3 14 15", 9) + "\n"
    assert result.stderr == ""
    assert len(result.stdout.split()) == 12


def test_beams_find_another_text_that_repeats_nothing(llama: Path, monkeypatch, capsys) -> None:
    words = ("--load", llama, "--prompt", "3 14 15", "--tokens-to-generate", "9", "--num-beams", "4")
    words = (*words, "--length-penalty", "0.5", "--no-repeat-ngram-size", "2")
    status, alone, _ = call_tool(monkeypatch, capsys, *words)
    assert status == 0
    tokens = alone.split()
    assert tokens[:3] == ["3", "14", "15"]
    assert len(set(itertools.pairwise(tokens))) == len(tokens) - 1
    assert alone != expected_text(f"{LLAMA_SHAPE} {NULL_TOKENIZER}", "3 14 15", 9) + "\n"


LLAMA = f"{LLAMA_SHAPE} {NULL_TOKENIZER}"


def test_prompts_are_read_until_stop(llama: Path, monkeypatch, capsys) -> None:
    typed = "3 14 15\n\nfive\n92 6\nstop\n7\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    status, out, error = call_tool(monkeypatch, capsys, llama, "--max-tokens", "6", "--temperature", "0")
    assert status == 0
    texts = out.removesuffix("\n").split(f"\n{text_generation_cli.SEPARATOR}\n")
    assert texts[0] == expected_text(LLAMA, "3 14 15", 6)
    assert texts[-1].splitlines()[-1] == expected_text(LLAMA, "92 6", 6)
    assert error.startswith("error: NullTokenizer reads token ids")
    assert error.count("\n") == 1, "the next prompt is read"
    assert sys.stdin.read() == "7\n", "nothing is read after stop"


def test_prompts_end_with_the_input(llama: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 14"))
    beams = ("--num-beams", "4", "--tokens-to-generate", "5")
    streamed = call_tool(monkeypatch, capsys, "--load", llama, *beams)
    assert streamed == call_tool(monkeypatch, capsys, "--load", llama, "--prompt", "3 14", *beams)


def test_rank_0_reads_the_prompts_of_all_ranks(llama: Path) -> None:
    run = fork_training(("--load", str(llama), "--max-tokens", "6", "--greedy"), 2, program=_generate_typed).check()
    expected = [expected_text(LLAMA, prompt, 6) for prompt in ("3 14", "92")]
    assert run.outputs == (f"\n{text_generation_cli.SEPARATOR}\n".join(expected) + "\n", "")


def _generate_typed(argv: Sequence[str], faults: Faults) -> int:
    sys.stdin = io.StringIO("3 14\n92\nstop\n" if os.environ["RANK"] == "0" else "4\n")
    return text_generation_cli.main(list(argv))


def test_the_default_length_fits_learned_positions(gpt2: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    status, out, _ = call_tool(monkeypatch, capsys, gpt2, "--prompt", "x" * 33, "--greedy")
    assert status == 0
    flags = f"{GPT2_SHAPE} {byte_level_flags(tmp_path)}"
    assert out == expected_text(flags, "x" * 33, 7) + "\n"
    error = call_tool(monkeypatch, capsys, gpt2, "--prompt", "x" * 33, "--tokens-to-generate", "8")[2]
    assert "the model has 40 learned positions" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-beams", "0"), "--num-beams 0 is not positive"),
        (
            ("--num-beams", "100"),
            ("num_beams 100 is too large: only 99 of the model's tokens do not end a sequence; use 1..99"),
        ),
        (("--num-beams", "2", "--top-k", "3"), "beam search does not sample"),
        (("--length-penalty", "2"), "--length-penalty 2.0 has no effect without --num-beams 2 or more"),
        (("--early-stopping", "never"), "--early-stopping never has no effect without --num-beams 2 or more"),
        (("--no-repeat-ngram-size", "-1"), "--no-repeat-ngram-size -1 is negative"),
    ],
)
def test_beams_that_cannot_be_are_one_line_and_status_2(llama: Path, monkeypatch, capsys, words, message: str) -> None:
    status, out, error = call_tool(monkeypatch, capsys, "--load", llama, "--prompt", "3 14", *words)
    assert (status, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


def test_four_processes_print_the_same_once(llama: Path) -> None:
    """They share two key-value groups, and pad the vocabulary of 100 to 512, so that the last ones hold none of it."""
    words = ("--load", llama, "--prompt", "3 14 15", "--tokens-to-generate", "9", "--greedy")
    run = fork_training(words, 4, program=_generate).check()
    assert run.outputs == (expected_text(f"{LLAMA_SHAPE} {NULL_TOKENIZER}", "3 14 15", 9) + "\n", "", "", "")


def _generate(argv: Sequence[str], faults: Faults) -> int:
    return text_generation_cli.main(list(argv))


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("num_processes", "shape", "layout"),
    [
        (2, LLAMA_SHAPE, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, LLAMA_SHAPE, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|L"),
        (4, GPT2_SHAPE, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    ],
)
def test_a_checkpoint_of_several_processes_generates_on_one(
    num_processes: int, shape: str, layout: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    flags = f"{shape} {NULL_TOKENIZER}"
    run_distributed(num_processes, save, tmp_path, f"{flags} {layout}")
    words = ("--load", tmp_path, "--prompt", "8 1", "--tokens-to-generate", "7", "--greedy")
    assert call_tool(monkeypatch, capsys, *words) == (0, expected_text(flags, "8 1", 7) + "\n", "")


def test_the_checkpoint_brings_its_tokenizer(gpt2: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    words = ("--load", gpt2, "--prompt", "hello, wörld", "--tokens-to-generate", "12", "--greedy")
    status, out, _ = call_tool(monkeypatch, capsys, *words)
    assert status == 0
    assert out == expected_text(f"{GPT2_SHAPE} {byte_level_flags(tmp_path)}", "hello, wörld", 12) + "\n"
    assert out.startswith("hello, wörld")


def test_the_flags_replace_the_tokenizer(gpt2: Path, monkeypatch, capsys) -> None:
    """The ids of the text show: 'hello' is one of them."""
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "260")
    words = ("--load", gpt2, "--prompt", "259 44", "--tokens-to-generate", "3", "--greedy")
    status, out, _ = call_tool(monkeypatch, capsys, *words, *tokenizer)
    assert status == 0
    assert out.startswith("259 44 ")
    assert len(out.split()) <= 5


def test_a_checkpoint_without_a_recorded_tokenizer_uses_its_configuration(tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{GPT2_SHAPE} {NULL_TOKENIZER}"
    save(tmp_path, flags, with_tokenizer=False)
    words = ("--load", tmp_path, "--prompt", "5", "--tokens-to-generate", "4", "--greedy")
    assert call_tool(monkeypatch, capsys, *words) == (0, expected_text(flags, "5", 4) + "\n", "")


def test_an_older_iteration_can_be_asked_for(llama: Path, monkeypatch, capsys) -> None:
    flags = f"{LLAMA_SHAPE} {NULL_TOKENIZER}"
    words = ("--load", llama, "--prompt", "3 14", "--tokens-to-generate", "9", "--greedy")
    newest = call_tool(monkeypatch, capsys, *words)
    older = call_tool(monkeypatch, capsys, *words, "--ckpt-step", "5")
    assert newest == (0, expected_text(flags, "3 14", 9) + "\n", "")
    assert older == (0, expected_text(flags, "3 14", 9, seed=78) + "\n", "")
    assert newest != older


def test_the_folder_of_one_checkpoint_can_be_named(llama: Path, monkeypatch, capsys) -> None:
    words = ("--load", llama / "iter_0000005", "--prompt", "3 14", "--tokens-to-generate", "9", "--greedy")
    expected = expected_text(f"{LLAMA_SHAPE} {NULL_TOKENIZER}", "3 14", 9, seed=78)
    assert call_tool(monkeypatch, capsys, *words) == (0, expected + "\n", "")


def test_a_seed_gives_its_text_again(llama: Path, monkeypatch, capsys) -> None:
    flags = ("--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--seed", "3")
    words = ("--load", llama, "--prompt", "3 14", "--tokens-to-generate", "9", *flags)
    first, again = (call_tool(monkeypatch, capsys, *words) for _ in range(2))
    sampling = SamplingConfig(temperature=0.9, top_k=50, top_p=0.95, seed=3)
    expected = expected_text(f"{LLAMA_SHAPE} {NULL_TOKENIZER}", "3 14", 9, sampling)
    assert first == again == (0, expected + "\n", "")
    assert call_tool(monkeypatch, capsys, *words, "--seed", "4") != first


def test_a_file_gives_several_prompts(llama: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    prompts = ["3 14 15", "92", "6 5 35"]
    (tmp_path / "prompts.txt").write_text("3 14 15\n\n92\n  \n6 5 35")
    words = ("--load", llama, "--prompt-file", tmp_path / "prompts.txt", "--tokens-to-generate", "6", "--greedy")
    status, out, _ = call_tool(monkeypatch, capsys, *words)
    assert status == 0
    texts = out.removesuffix("\n").split(f"\n{text_generation_cli.SEPARATOR}\n")
    assert texts == [expected_text(f"{LLAMA_SHAPE} {NULL_TOKENIZER}", prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("flag", ["--bf16", "--fp16"])
def test_half_precision_checkpoints_generate(tmp_path: Path, flag: str, monkeypatch, capsys) -> None:
    flags = f"{GPT2_SHAPE} {NULL_TOKENIZER} {flag}"
    save(tmp_path, flags)
    words = ("--load", tmp_path, "--prompt", "5 6", "--tokens-to-generate", "4", "--greedy")
    assert call_tool(monkeypatch, capsys, *words) == (0, expected_text(flags, "5 6", 4) + "\n", "")
    assert run_config(flags)[0].model.params_dtype == ("bfloat16" if flag == "--bf16" else "float16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load {nowhere} --prompt 5", "--load {nowhere} is not a folder"),
        ("--load {empty} --prompt 5", "{empty} contains no checkpoint"),
        ("--load {llama} --prompt 5 --ckpt-step 7", "change --ckpt-step 7 to one of: 5, 10"),
        ("--load {llama}", "standard input has no prompt; give --prompt TEXT, --prompt-file FILE, or lines"),
        ("--prompt 5", "one of the arguments DIR --load --load-hf is required"),
        ("--load {llama} --load-hf {llama} --prompt 5", "--load-hf: not allowed with argument --load"),
        ("--load-hf {nowhere} --prompt 5", "--load-hf {nowhere} is not a folder"),
        ("--load-hf {empty} --prompt 5", "--load-hf {empty} is not a Hugging Face model folder"),
        ("--load-hf {empty} --prompt 5 --ckpt-step 3", "--ckpt-step 3 requires --load"),
        ("--load {llama} --prompt=", "--prompt is empty"),
        ("--load {llama} --prompt \udcff", "--prompt is not valid UTF-8"),
        ("--load {llama} --prompt 5 --prompt-file x", "not allowed with argument --prompt"),
        ("--load {llama} --prompt-file {nowhere}", "cannot read --prompt-file {nowhere}"),
        ("--load {llama} --prompt-file {blank}", "--prompt-file {blank} contains no text"),
        ("--load {llama} --prompt 5 --tokens-to-generate 0", "(--tokens-to-generate) 0 is not positive"),
        ("--load {llama} --prompt 5 --tokens-to-generate many", "invalid int value: 'many'"),
        (
            "--load {llama} --prompt 5 --top-p 1.5 --top-k -1",
            "sample from all tokens; --top-p 1.5 is",
        ),
        ("--load {llama} --prompt 5 --greedy --top-k 3", "--greedy or --temperature 0 does not sample"),
        ("--load {llama} --prompt 5 --gredy", "unrecognized arguments: --gredy"),
        (
            "--load {llama} --prompt 5 --tensor-model-parallel-size 0",
            "--tensor-model-parallel-size 0 is not positive; use 1 or more",
        ),
        ("--load {llama} --prompt 5 --pipeline-model-parallel-size 2", "the number of processes 1 is not divisible by"),
        (
            "--load {llama} --prompt 5 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3",
            "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 3 requires 6 processes, but 1 was "
            "started; run torchrun --nproc_per_node 6",
        ),
        ("--load {llama} --prompt 5 --expert-model-parallel-size 2", "--tensor-model-parallel-size 1"),
        (
            "--load {llama} --prompt 5 --expert-model-parallel-size 0",
            "--expert-model-parallel-size 0 is not positive; use 1 or more",
        ),
        ("--load {llama} --prompt five", "NullTokenizer reads token ids"),
        ("--load {llama} --prompt 100", "id 100 is not in 0..99"),
        ("--load {llama} --prompt 5 --vocab-size 200", "NullTokenizer has 201 ids, but the model was trained with 100"),
        ("--load {llama} --prompt 5 --tokenizer-type GPT2BPETokenizer", "--vocab-file"),
        ("--load {llama} --prompt 5 --tokenizer-type None", "--tokenizer-type None is not supported"),
        ("--load {gpt2} --prompt hello --tokens-to-generate 40", "the model has 40 learned positions"),
        (
            "--load {gpt2} --prompt hello --vocab-file {fewer}/vocab.json --merge-file {fewer}/merges.txt",
            "GPT2BPETokenizer has 260 ids, but the model was trained with GPT2BPETokenizer and 261 ids",
        ),
        (
            "--load {gpt2} --prompt hello --vocab-file {other}/vocab.json --merge-file {other}/merges.txt",
            "{other}/vocab.json is not the vocab.json that the model was trained with: its SHA-256",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    words: str, message: str, llama: Path, gpt2: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").write_text("\n \n")
    for name, merges in (("fewer", ["h e", "l l", "he ll"]), ("other", ["h e", "l l", "he ll", "hell a"])):
        (tmp_path / name).mkdir()
        byte_level_flags(tmp_path / name, merges)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    places = {"fewer": tmp_path / "fewer", "other": tmp_path / "other"}
    places |= {"llama": llama, "gpt2": gpt2, **{name: tmp_path / name for name in ("empty", "blank", "nowhere")}}
    status, out, err = call_tool(monkeypatch, capsys, *(word.format(**places) for word in words.split()))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message.format(**places) in err
    assert err.count("\n") == 1


@pytest.mark.long
def test_processes_that_hold_different_experts_print_what_one_does(tmp_path: Path) -> None:
    shape = f"{LLAMA_SHAPE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 20"
    save(tmp_path, f"{shape} {NULL_TOKENIZER}")
    words = ("--load", tmp_path, "--prompt", "3 14 15", "--tokens-to-generate", "9", "--greedy")
    expected = expected_text(f"{shape} {NULL_TOKENIZER}", "3 14 15", 9)
    assert run_tool(*words, "--expert-model-parallel-size", "2", nproc=2).check().stdout == expected + "\n"


@pytest.mark.parametrize("pattern", ["index.json", "*.safetensors"])
def test_a_damaged_checkpoint_is_passed_over(pattern: str, tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{GPT2_SHAPE} {NULL_TOKENIZER}"
    save(tmp_path, flags, iteration=5, seed=78)
    save(tmp_path, flags)
    (damaged,) = (tmp_path / "iter_0000010").glob(pattern)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if pattern != "index.json" else content[:99])
    words = ("--load", tmp_path, "--prompt", "5", "--tokens-to-generate", "4", "--greedy")
    status, out, err = call_tool(monkeypatch, capsys, *words)
    assert (status, out) == (0, expected_text(flags, "5", 4, seed=78) + "\n")
    assert err.count("\n") == 1
    assert "falling back to" in err


def test_heads_that_do_not_divide_are_said_by_the_first_process(llama: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("megatron.training.exit_reason._WAIT_FOR_REPORT_S", 0.0)
    # The other ranks answer torchrun's signal; the test session keeps its own answer.
    monkeypatch.setattr("megatron.training.exit_reason.signal.signal", lambda number, handler: None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    results = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        results.append(call_tool(monkeypatch, capsys, "--load", llama, "--prompt", "5"))
    (status, out, err), other = results
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: 3 processes ")
    assert "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3" in err
    assert other == (2, "", "")


def test_wrong_usage_is_answered_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "watch.py"
    script.write_text(
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    result = run_command([sys.executable, script, "--load", tmp_path / "nowhere", "--prompt", "5"])
    assert (result.returncode, result.stdout) == (2, "False\n")


QWEN_SHAPE = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 44 --swiglu --normalization RMSNorm --disable-bias-linear --add-qkv-bias --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --untie-embeddings-and-output-weights"
)


def hugging_face_folder(folder: Path, flags: str) -> Path:
    save(folder / "native", flags)
    source = NativeSource(folder / "native" / "iter_0000010")
    write_hugging_face(source, folder / "hf")
    source.close()
    return folder / "hf"


def test_a_hugging_face_folder_brings_its_tokenizer(tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{GPT2_SHAPE} {byte_level_flags(tmp_path)}"
    words = ("--load-hf", hugging_face_folder(tmp_path, flags), "--prompt", "hello, wörld", "--greedy")
    status, out, _ = call_tool(monkeypatch, capsys, *words, "--tokens-to-generate", "12")
    assert (status, out) == (0, expected_text(flags, "hello, wörld", 12) + "\n")


def test_a_hugging_face_folder_without_a_tokenizer_takes_ids(tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{QWEN_SHAPE} {NULL_TOKENIZER}"
    words = ("--load-hf", hugging_face_folder(tmp_path, flags), "--prompt", "3 14 15", "--greedy")
    status, out, _ = call_tool(monkeypatch, capsys, *words, "--tokens-to-generate", "9")
    assert (status, out) == (0, expected_text(flags, "3 14 15", 9) + "\n")


@pytest.mark.long
def test_a_hugging_face_folder_is_cut_over_processes(tmp_path: Path) -> None:
    flags = f"{QWEN_SHAPE} {NULL_TOKENIZER}"
    words = ("--load-hf", hugging_face_folder(tmp_path, flags), "--prompt", "3 14 15", "--tokens-to-generate", "9")
    result = run_tool(*words, "--greedy", "--tensor-model-parallel-size", "2", nproc=2).check()
    assert result.stdout == expected_text(flags, "3 14 15", 9) + "\n"


def megatron_folder(
    folder: Path,
    flags: str,
    iteration: int | Literal["release"] = 10,
    write: Callable[..., Path] = write_megatron_torch,
) -> Path:
    save(folder / "native", flags)
    source = NativeSource(folder / "native" / "iter_0000010")
    write(source, folder / "megatron", iteration)
    source.close()
    return folder / "megatron"


@pytest.mark.parametrize("write", [write_megatron_torch, write_torch_dist])
def test_megatrons_files_with_ids_for_text(write: Callable[..., Path], tmp_path: Path, monkeypatch, capsys) -> None:
    flags = f"{QWEN_SHAPE} {NULL_TOKENIZER}"
    folder = megatron_folder(tmp_path, flags, write=write)
    words = ("--load", folder, "--prompt", "3 14 15", "--tokens-to-generate", "9", "--greedy")
    assert call_tool(monkeypatch, capsys, *words) == (0, expected_text(flags, "3 14 15", 9) + "\n", "")


def test_rows_that_pad_megatrons_vocabulary_are_not_chosen(tmp_path: Path, monkeypatch, capsys) -> None:
    """Megatron's own files do not tell how many of their rows are padding: the tokenizer does."""
    flags = f"{GPT2_SHAPE} {byte_level_flags(tmp_path)}"
    folder = megatron_folder(tmp_path, flags, "release")
    (file,) = folder.rglob("model_optim_rng.pt")
    values = torch.load(file, weights_only=False)
    del values["args"].true_vocab_size
    torch.save(values, file)
    shutil.rmtree(folder / "release" / "tokenizer")
    source = MegatronTorchSource(folder / "release")
    assert source.tensors["model.embedding.word_embeddings.weight"].global_shape[0] == 384
    source.close()
    words = ("--load", folder, "--prompt", "hello, wörld", "--tokens-to-generate", "20")
    words += tuple(byte_level_flags(tmp_path).split())
    status, out, _ = call_tool(monkeypatch, capsys, *words, "--temperature", "50", "--seed", "3")
    drawn = SamplingConfig(temperature=50.0, seed=3)
    assert (status, out) == (0, expected_text(flags, "hello, wörld", 20, drawn) + "\n")


def test_a_damaged_file_of_megatrons_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = megatron_folder(tmp_path, f"{QWEN_SHAPE} {NULL_TOKENIZER}")
    (file,) = folder.rglob("model_optim_rng.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, out, err = call_tool(monkeypatch, capsys, "--load", folder, "--prompt", "5", "--tokens-to-generate", "5")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err
