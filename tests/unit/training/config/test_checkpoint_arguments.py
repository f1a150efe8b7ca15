"""``--use-checkpoint-args``: the shape of the model comes from the checkpoint before anything is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigurationError
from megatron.training.config.arguments import ParsedArguments, resolve_arguments
from megatron.training.config.checkpoint_arguments import read_checkpoint_arguments

SHAPED = """
    --num-layers 6 --hidden-size 40 --num-attention-heads 5 --seq-length 48 --swiglu --normalization RMSNorm
    --group-query-attention --num-query-groups 1 --position-embedding-type rope --disable-bias-linear
    --ffn-hidden-size 56 --rotary-base 5000 --qk-layernorm --untie-embeddings-and-output-weights --norm-epsilon 1e-6
"""
REST = """
    --micro-batch-size 2 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 50
"""

TAKEN = """
    num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention
    num_query_groups normalization norm_epsilon apply_layernorm_1p qk_layernorm
    qk_layernorm_across_heads norm_placement use_parallel_residual
    attn_logit_softcapping query_pre_attn_scalar
    window_size window_attn_skip_freq
    swiglu geglu squared_relu
    openai_gelu bias_gelu_fusion add_bias_linear add_qkv_bias hidden_dropout attention_dropout
    max_position_embeddings position_embedding_type use_rotary_position_embeddings add_position_embedding
    rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling
    rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor
    rope_scaling_original_max_position_embeddings
    rotary_base_local scale_embeddings final_logit_softcapping untie_embeddings_and_output_weights
    seq_length
"""


def parse(*words: object, world_size: int = 1) -> ParsedArguments:
    return resolve_arguments([part for word in words for part in str(word).split()], world_size)


def write_checkpoint(directory: Path, iteration: int, config: Any) -> Path:
    folder = directory / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    index = {"format_version": 1, "checksum": "", "common": {"config": config}, "files": {}, "tensors": {}}
    (folder / "index.json").write_text(json.dumps(index))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def test_the_shape_is_taken_and_everything_else_is_not(tmp_path: Path) -> None:
    written = parse(SHAPED, REST, "--tensor-model-parallel-size 1 --init-method-std 0.5 --bf16").config
    folder = write_checkpoint(tmp_path, 20, written.to_dict())
    taken = parse(REST, "--use-checkpoint-args --load", tmp_path)
    expected = parse(SHAPED, REST, "--load", tmp_path).config
    assert taken.config.model == expected.model
    assert taken.config.data == expected.data
    (note,) = [note for note in taken.notes if "--use-checkpoint-args" in note]
    assert note.startswith(f"--use-checkpoint-args: from {folder}: ")
    for part in ("num_layers 6", "hidden_size 40", "normalization RMSNorm", "seq_length 48", "rotary_base 5000"):
        assert part in note


def test_the_fields_that_are_taken_are_the_frozen_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, parse(SHAPED, REST).config.to_dict())
    taken = read_checkpoint_arguments(str(tmp_path), None).values
    assert list(taken) == TAKEN.split()


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
    with pytest.raises(ConfigurationError, match=r"index\.json: not readable as JSON .* give the model's flags"):
        parse(REST, load, "--ckpt-step 20")


def test_a_folder_without_a_checkpoint_leaves_the_flags_alone(tmp_path: Path) -> None:
    load = f"--use-checkpoint-args --load {tmp_path}"
    parsed = parse(SHAPED, REST, load)
    assert f"--use-checkpoint-args: {tmp_path} holds no checkpoint; the flags alone shape the model" in parsed.notes
    with pytest.raises(ConfigurationError, match="--num-layers is missing"):
        parse(REST, load)


def test_no_torch_is_imported_for_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, parse(SHAPED, REST).config.to_dict())
    words = [*REST.split(), "--use-checkpoint-args", "--load", str(tmp_path)]
    script = (
        "import sys; from megatron.training.config.arguments import resolve_arguments; "
        f"resolve_arguments({words!r}, 1); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[4]).returncode == 0
