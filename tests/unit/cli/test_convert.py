"""The converter's flags and the folders that commands take: Megatron's are known, others are refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.checkpoint.conversion_request import idle_flags
from megatron.cli import convert, diff_checkpoints, inspect_checkpoint
from megatron.cli.convert import NO_EFFECT, parse_arguments
from megatron.cli.doctor import doctor
from tests.harness.object_faults import empty_memory_store

FOLDERS = ["--load-dir", "a", "--save-dir", "b"]
TYPED = """
    --bf16 --model-type GPT --loader llama_mistral --saver mcore --target-tensor-parallel-size 8
    --checkpoint-type hf --tokenizer-model dir --saver-transformer-impl transformer_engine
    --model-size llama3 --make-vocab-size-divisible-by 1 --target-expert-parallel-size 1
    --no-checking --max-queue-size 1 --megatron-path . --true-vocab-size 128256
"""


def test_what_users_of_megatron_type_is_accepted_and_said() -> None:
    request, notes = parse_arguments([*TYPED.split(), *FOLDERS])
    assert (request.target.tensor_parallel_size, request.target.params_dtype) == (8, "bfloat16")
    assert request.verify
    told = {note.split(" ")[0] for note in notes}
    assert told == {
        "--saver-transformer-impl",
        "--model-size",
        "--no-checking",
        "--max-queue-size",
        "--megatron-path",
    }
    assert told <= set(NO_EFFECT)
    assert not parse_arguments([*FOLDERS, "--no-verify"])[0].verify


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--target-tensor-paralel-size 2", "did you mean --target-tensor-parallel-size?"),
        ("--target_tensor_parallel_size 2", "did you mean --target-tensor-parallel-size?"),
        ("--loader troch", "unknown --loader troch; did you mean torch?"),
        ("--saver safetensors_v9", "unknown --saver safetensors_v9; one of megatron, native"),
        ("--model-type BERT", "invalid choice: 'BERT'"),
        (
            "--target-expert-tensor-parallel-size 4",
            "--target-expert-tensor-parallel-size 4 is not supported: experts are sharded like the other layers",
        ),
        ("--checkpoint-type meta", "Meta's own files"),
        ("--target-tensor-parallel-size two", "invalid int value: 'two'"),
        ("--bf16 --fp16", "not allowed with argument --bf16"),
        ("--num-experts 8", "--num-experts 8 changes nothing without --moe-use-upcycling; add --moe-use-upcycling"),
        ("--moe-use-upcycling", "--moe-use-upcycling requires a number of experts; add --num-experts, for example 8"),
        ("--moe-use-upcycling --num-experts 1", "--num-experts 1 is not a multiple of --moe-upcycling-granularity 1"),
        ("--moe-use-upcycling --num-experts 6 --moe-upcycling-granularity 4", "use for example 32"),
        ("--moe-use-upcycling --num-experts 8 --moe-upcycling-granularity 0", "--moe-upcycling-granularity 0 is not"),
        ("--moe-use-upcycling --num-experts 8 --moe-router-topk 1", "the router could not learn; use 2 or more"),
        ("--moe-use-upcycling --num-experts 8 --moe-router-topk 9", "up to --num-experts 8; use for example 2"),
        ("--moe-use-upcycling --num-experts 8 --moe-upcycling-granularity 4", "--moe-router-topk 2 is not a multiple"),
        ("--moe-use-upcycling --num-experts 8 --saver peft", "PEFT folders contain adapters; use --saver hf"),
        ("stray", "argument DIR: not allowed with argument --load-dir/--load"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments([*FOLDERS, *words.split()])
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert expected in line
    assert line.count("\n") == 1


ALL_CONTENT = """
    --target-tensor-parallel-size 2 --make-vocab-size-divisible-by 64 --tokenizer-model dir --no-save-optim
    --true-vocab-size 61
"""


@pytest.mark.parametrize(
    ("found", "saver", "idle"),
    [
        ("torch", "torch", []),
        ("native", "torch", ["--true-vocab-size 61 has"]),
        ("torch", "native", ["--target-tensor-parallel-size 2 changes", "--make-vocab-size-divisible-by 64 changes"]),
        (
            "native",
            "hf",
            [
                "--target-tensor-parallel-size 2 has",
                "--make-vocab-size-divisible-by 64 has",
                "--tokenizer-model dir has",
                "--no-save-optim has",
                "--true-vocab-size 61 has",
            ],
        ),
    ],
)
def test_a_flag_that_the_formats_leave_idle_is_said(found: str, saver: str, idle: list[str]) -> None:
    lines = idle_flags(parse_arguments([*ALL_CONTENT.split(), *FOLDERS])[0], found, saver)
    assert [line[: len(start)] for line, start in zip(lines, idle, strict=True)] == idle
    assert idle_flags(parse_arguments(FOLDERS)[0], found, saver) == []


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        (inspect_checkpoint.main, "s3:///x", "argument DIR: s3:///x has no bucket; write s3://BUCKET/FOLDER"),
        (inspect_checkpoint.main, "memory://x", "memory://x is not a folder; pass a folder that contains a checkpoint"),
        (diff_checkpoints.main, "memory://x ftp://host/x", "argument B: ftp:// is not a supported object store"),
        (diff_checkpoints.main, "memory://x memory://y", "memory://x is not a folder"),
        (convert.main, "--load-dir memory://x --save-dir y", "memory://x is not a folder"),
        (convert.main, "--load-dir s3://id:hunter2@b/x --save-dir y", "s3://*** contains a credential or a port"),
        (convert.main, "--load-dir x --save-dir memory://y", "argument --save-dir/--save: no URL can be used here"),
        (convert.main, "--load-dir x --save-dir y --base-model memory://z", "--base-model: no URL can be used here"),
        (doctor.main, "--save memory://x", "argument --save: no URL can be used here; pass a folder"),
    ],
)
def test_a_url_that_a_command_cannot_use_is_refused_in_a_line(
    command: Callable[[list[str]], int], words: str, line: str, capsys
) -> None:
    with empty_memory_store():
        try:
            status = command(words.split())
        except SystemExit as end:
            status = int(end.code or 0)
    said = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert len(said) == 1
    assert line in said[0]
    assert "hunter2" not in said[0]
