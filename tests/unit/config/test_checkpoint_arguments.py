"""``--use-checkpoint-args``: the shape of the model comes from the checkpoint before anything is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.config.checkpoint_arguments import read_checkpoint_arguments
from megatron.core.errors import ConfigurationError
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer, byte_characters
from megatron.core.tokenizers.tokenizer_record import record_tokenizer

SHAPED = """
    --num-layers 6 --hidden-size 40 --num-attention-heads 5 --seq-length 48 --swiglu --normalization RMSNorm
    --group-query-attention --num-query-groups 1 --position-embedding-type rope --disable-bias-linear
    --ffn-hidden-size 56 --rotary-base 5000 --qk-layernorm --untie-embeddings-and-output-weights --norm-epsilon 1e-6
"""
TRAINED = "--micro-batch-size 2 --train-iters 10 --lr 1e-4 --mock-data"
REST = f"{TRAINED} --tokenizer-type NullTokenizer --vocab-size 50"
TAKEN = Path(__file__).with_name("frozen_checkpoint_fields.txt")


def parse(*words: object, world_size: int = 1) -> ParsedArguments:
    return resolve_arguments([part for word in words for part in str(word).split()], world_size)


def write_checkpoint(directory: Path, iteration: int, config: Any) -> Path:
    folder = directory / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    index = {"format_version": 1, "checksum": "", "common": {"config": config}, "files": {}, "tensors": {}}
    (folder / "index.json").write_text(json.dumps(index))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def taken_fields(folder: Path) -> list[str]:
    write_checkpoint(folder, 20, parse(SHAPED, REST).config.to_dict())
    return list(read_checkpoint_arguments(str(folder), None).values)


def test_shape_precision_and_tokenizer_are_taken_and_nothing_else(tmp_path: Path) -> None:
    written = parse(SHAPED, REST, "--tensor-model-parallel-size 1 --init-method-std 0.5 --bf16").config
    folder = write_checkpoint(tmp_path, 20, written.to_dict())
    taken = parse(TRAINED, "--use-checkpoint-args --load", tmp_path)
    expected = parse(SHAPED, REST, "--bf16 --load", tmp_path).config
    assert taken.config.tokenizer == expected.tokenizer
    assert taken.config.model == expected.model
    assert taken.config.data == expected.data
    (note,) = [note for note in taken.notes if "--use-checkpoint-args" in note]
    assert note.startswith(f"--use-checkpoint-args: from {folder}: ")
    for part in ("num_layers 6", "hidden_size 40", "normalization RMSNorm", "seq_length 48", "rotary_base 5000"):
        assert part in note
    for part in ("bf16 True", "tokenizer_type NullTokenizer", "vocab_size 50"):
        assert part in note


def test_one_flag_of_a_precision_or_a_tokenizer_says_all_of_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, parse(SHAPED, REST, "--bf16").config.to_dict())
    given = f"--fp16 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    (tmp_path / "tokenizer.json").write_text("{}")
    config = parse(TRAINED, given, "--use-checkpoint-args --load", tmp_path).config
    assert (config.model.fp16, config.model.bf16) == (True, False)
    assert config.tokenizer == parse(SHAPED, TRAINED, given).config.tokenizer


def test_the_copies_of_a_tokenizer_stand_for_its_files(tmp_path: Path) -> None:
    files = [tmp_path / "vocab.json", tmp_path / "merges.txt"]
    tokens = [*byte_characters(), "<|endoftext|>"]
    files[0].write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    files[1].write_text("#version: 0.2\n")
    written = parse(SHAPED, TRAINED, "--vocab-file", files[0], "--merge-file", files[1]).config
    folder = write_checkpoint(tmp_path / "run", 20, written.to_dict())
    record_tokenizer(GPT2BPETokenizer(*files), folder)
    for file in files:
        file.unlink()
    tokenizer = parse(TRAINED, "--use-checkpoint-args --load", tmp_path / "run").config.tokenizer
    assert tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert tokenizer.vocab_file == str(folder / "tokenizer" / "vocab.json")
    assert tokenizer.merge_file == str(folder / "tokenizer" / "merges.txt")


def test_a_hugging_face_folder_gives_what_it_says(tmp_path: Path) -> None:
    settings = {
        "model_type": "gpt2", "n_embd": 40, "n_head": 5, "n_layer": 3, "n_positions": 96, "vocab_size": 51,
        "activation_function": "gelu_new", "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes(b"")
    parsed = parse(REST, "--use-checkpoint-args --seq-length 48 --load", tmp_path)
    model = parsed.config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.bf16) == (3, 40, 5, True)
    assert model.max_position_embeddings == 96
    assert read_checkpoint_arguments(str(tmp_path), None).missing == ("seq_length", "tokenizer_type")


@pytest.mark.parametrize(
    ("flags", "rows"), [("", 51), ("--extra-vocab-size 3", None), ("--vocab-file v.json --merge-file m.txt", None)]
)
def test_rows_beyond_the_tokenizer_are_taken(tmp_path: Path, flags: str, rows: int | None) -> None:
    """A published model may have more rows than its tokenizer has ids (Qwen2.5: 152,064 and 151,665)."""
    settings = {"model_type": "gpt2", "n_embd": 40, "n_head": 5, "n_layer": 3, "n_positions": 96, "vocab_size": 51}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for name in ("model.safetensors", "vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    typed = f"{TRAINED} {flags} --use-checkpoint-args --seq-length 48 --load {tmp_path}".split()
    parsed = resolve_arguments(typed, 1, needs_files=False)
    assert parsed.config.tokenizer.padded_vocab_size == rows


def test_what_a_checkpoint_does_not_provide_is_said(tmp_path: Path) -> None:
    config = parse(SHAPED, REST).config.to_dict()
    del config["model"]["max_position_embeddings"], config["data"]["seq_length"]
    write_checkpoint(tmp_path, 20, config)
    parsed = parse(TRAINED, "--use-checkpoint-args --seq-length 48 --load", tmp_path)
    assert "Checkpoint did not provide arguments max_position_embeddings" in parsed.notes


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--load .*absent does not exist"):
        parse(SHAPED, REST, "--use-checkpoint-args --load", tmp_path / "absent")
    with pytest.raises(ConfigurationError) as caught:
        parse("--use-checkpoint-args --load", tmp_path / "absent")
    # Of the shape and the tokenizer, which the checkpoint would have given, nothing is said.
    assert len(caught.value.problems) == 1


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_checkpoint(tmp_path / "moved", 20, parse(SHAPED, REST).config.to_dict())
    (tmp_path / "moved" / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ConfigurationError, match=r"contains no checkpoint .*; pass the folder") as caught:
        parse(TRAINED, "--use-checkpoint-args --load", tmp_path / "run")
    assert len(caught.value.problems) == 1
    # The checkpoint is there, and only the file that names it is lost.
    assert read_checkpoint_arguments(str(tmp_path / "moved"), None).folder == tmp_path / "moved" / "iter_0000020"


def test_the_fields_that_are_taken_are_the_frozen_ones(tmp_path: Path) -> None:
    assert taken_fields(tmp_path) == TAKEN.read_text(encoding="utf-8").split()


def test_a_flag_that_is_given_holds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, parse(SHAPED, REST).config.to_dict())
    config = parse(REST, "--use-checkpoint-args --num-layers 2 --hidden-dropout 0.25 --load", tmp_path).config
    assert (config.model.num_layers, config.model.hidden_size, config.model.hidden_dropout) == (2, 40, 0.25)


def test_the_checkpoint_that_is_asked_for_is_read(tmp_path: Path) -> None:
    for iteration, layers in ((10, 3), (20, 7)):
        write_checkpoint(tmp_path, iteration, parse(SHAPED, "--num-layers", layers, REST).config.to_dict())
    load = f"--use-checkpoint-args --load {tmp_path}"
    assert parse(REST, load).config.model.num_layers == 7
    assert parse(REST, load, "--ckpt-step 10").config.model.num_layers == 3
    with pytest.raises(ConfigurationError, match=r"--ckpt-step 15 to one of: 10, 20"):
        parse(REST, load, "--ckpt-step 15")


def test_what_was_read_is_checked_like_what_was_typed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, parse(SHAPED, REST).config.to_dict())
    with pytest.raises(ConfigurationError) as caught:
        parse(REST, "--use-checkpoint-args --tensor-model-parallel-size 2 --load", tmp_path, world_size=2)
    assert "--num-attention-heads 5" in str(caught.value)


def test_a_damaged_index_is_passed_over_as_the_load_will(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, parse(SHAPED, REST).config.to_dict())
    newest = write_checkpoint(tmp_path, 20, {})
    load = f"--use-checkpoint-args --load {tmp_path}"
    assert parse(REST, load).config.model.num_layers == 6
    (newest / "index.json").write_text('{"format_')
    assert parse(REST, load).config.model.num_layers == 6
    with pytest.raises(ConfigurationError, match=r"index\.json: not readable as JSON .* pass the model's flags"):
        parse(REST, load, "--ckpt-step 20")


def test_a_folder_without_a_checkpoint_leaves_the_flags_alone(tmp_path: Path) -> None:
    load = f"--use-checkpoint-args --load {tmp_path}"
    parsed = parse(SHAPED, REST, load)
    assert f"--use-checkpoint-args: {tmp_path} contains no checkpoint; the flags alone define the model" in parsed.notes


def test_no_torch_is_imported_for_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, parse(SHAPED, REST).config.to_dict())
    words = [*REST.split(), "--use-checkpoint-args", "--load", str(tmp_path)]
    script = (
        "import sys; from megatron.config.arguments import resolve_arguments; "
        f"resolve_arguments({words!r}, 1); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3]).returncode == 0
