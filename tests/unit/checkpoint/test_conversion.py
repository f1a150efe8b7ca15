"""Conversions: which checkpoint a folder means, what changes in the state, and a result that is whole or absent."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint import checkpoint_folder
from megatron.checkpoint.checkpoint_folder import find_checkpoint
from megatron.checkpoint.conversion import STAGING_FOLDER, publish_checked, retarget, tokenizer_writer
from megatron.checkpoint.conversion_request import ConversionRequest, Target
from megatron.checkpoint.progress import ByteProgress
from megatron.config.run_config import RunConfig
from megatron.core.errors import CheckpointError, ConfigurationError, TokenizerError
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters
from megatron.core.tokenizers.tokenizer_record import RECORD_FILE, TOKENIZER_FOLDER
from megatron.training.fault_tolerance.processes import identify
from megatron.training.fault_tolerance.run_lock import FolderInUseError, OwnerRecord
from tests.unit.checkpoint.small_checkpoint import MemorySource, small_common, write_small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with iterations 2 and 4, the tracker file at 4."""
    folder = tmp_path_factory.mktemp("run")
    for iteration in (2, 4):
        write_small(folder, small_common(iteration=iteration, has_optimizer=False))
    return folder


def test_the_tracker_file_decides_unless_an_iteration_is_asked_for(run: Path) -> None:
    assert find_checkpoint(run).folder.name == "iter_0000004"
    assert find_checkpoint(run, 2).folder.name == "iter_0000002"
    assert find_checkpoint(run / "iter_0000002").folder == run / "iter_0000002"
    assert find_checkpoint(run).format == "native"
    with pytest.raises(CheckpointError, match=r"change --ckpt-step 3 to one of: 2, 4"):
        find_checkpoint(run, 3)


def test_a_checkpoint_in_another_format_is_refused_by_name(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"in the native format, not in Hugging Face's format; change --loader"):
        find_checkpoint(run, expected=("hf",))


def test_a_tracker_file_that_names_nothing_is_not_taken_for_an_older_checkpoint(tmp_path: Path) -> None:
    write_small(tmp_path, small_common(iteration=2, has_optimizer=False))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(CheckpointError, match="names iter_0000009, but there is no such folder"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [None, "", "four"])
def test_a_lost_tracker_file_is_no_choice_of_ours(text: str | None, tmp_path: Path) -> None:
    for iteration in (2, 4):
        write_small(tmp_path, small_common(iteration=iteration, has_optimizer=False))
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    if text is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=r"select one of its iterations with --ckpt-step: 2, 4$"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path, 4).folder == tmp_path / "iter_0000004"


@pytest.mark.parametrize("text", ["", "four"])
def test_a_release_beside_a_lost_tracker_file_is_not_taken_unasked(text: str, tmp_path: Path) -> None:
    write_small(tmp_path, small_common(iteration=2, has_optimizer=False))
    (tmp_path / "iter_0000002").rename(tmp_path / "release")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    with pytest.raises(CheckpointError, match=r"pass \S*/release, or write 'release' to that file$"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path / "release").folder == tmp_path / "release"
    tracker.write_text("release")
    assert find_checkpoint(tmp_path).folder == tmp_path / "release"


def test_an_iteration_is_found_without_a_look_at_the_tracker_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path, small_common(iteration=2, has_optimizer=False))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"

    def refuse(directory: Path) -> list[int]:
        raise AssertionError(f"{directory} was listed")

    monkeypatch.setattr(checkpoint_folder, "complete_iterations", refuse)
    assert find_checkpoint(tmp_path).folder == tmp_path / "iter_0000002"
    tracker.unlink()
    tracker.mkdir()
    assert find_checkpoint(tmp_path, 2).folder == tmp_path / "iter_0000002"
    with pytest.raises(CheckpointError, match="is a folder, not a file"):
        find_checkpoint(tmp_path)


def test_progress_is_told_at_intervals_with_its_rate() -> None:
    now, lines = 100.0, []
    progress = ByteProgress("writing", 4_000_000_000, lines.append, clock=lambda: now)
    progress.add(500_000_000)
    assert lines == []
    now = 102.5
    progress.add(500_000_000)
    now = 103.0
    progress.add(2_000_000_000)
    assert lines == ["  writing:  25% of 4.00 GB at 400 MB/s"]
    now = 110.0
    progress.add(3_000_000_000)
    assert lines[1] == "  writing: 100% of 4.00 GB at 600 MB/s"
    progress.finish()
    assert lines[2] == "  writing: 6.00 GB in 10.0 s at 600 MB/s"


def test_sizes_that_are_not_given_stay() -> None:
    common = small_common()
    common["config"]["model"]["tensor_model_parallel_size"] = 2
    common["config"]["model"]["sequence_parallel"] = True
    changed = retarget(common, Target(pipeline_parallel_size=2, num_layers_per_virtual_pipeline_stage=1))
    model = RunConfig.from_dict(changed["config"]).model
    assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == (2, 2)
    assert model.num_layers_per_virtual_pipeline_stage == 1
    assert model.sequence_parallel
    assert changed["layout"] == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 4,
    }
    for key in ("progress", "optimizer", "scheduler"):
        assert changed[key] == common[key]


def test_a_split_for_other_stages_goes_and_one_for_the_same_stages_stays() -> None:
    common = small_common()
    common["config"]["model"] |= {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}
    same = RunConfig.from_dict(retarget(common, Target(tensor_parallel_size=4))["config"]).model
    assert same.decoder_first_pipeline_num_layers == 1
    other = RunConfig.from_dict(retarget(common, Target(pipeline_parallel_size=4))["config"]).model
    assert other.decoder_first_pipeline_num_layers is None


def test_weights_alone_have_no_optimizer_and_may_change_type() -> None:
    changed = retarget(small_common(), Target(keeps_optimizer=False, params_dtype="bfloat16"))
    assert (changed["optimizer"], changed["scheduler"]) == (None, None)
    config = RunConfig.from_dict(changed["config"])
    assert (config.model.params_dtype, config.model.bf16) == ("bfloat16", True)
    assert config.optimizer.params_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(tensor_parallel_size=3), "--num-attention-heads 4 is not divisible by --target-tensor-parallel-size 3"),
        (Target(pipeline_parallel_size=3), "--target-pipeline-parallel-size"),
        (Target(tensor_parallel_size=0), "--target-tensor-parallel-size 0 is not positive"),
        (Target(make_vocab_size_divisible_by=0), "--make-vocab-size-divisible-by 0 is not positive"),
        (Target(make_vocab_size_divisible_by=-4), "--make-vocab-size-divisible-by -4 is not positive"),
        (Target(num_layers_per_virtual_pipeline_stage=2), "--target-pipeline-parallel-size is 1"),
        (
            Target(pipeline_parallel_size=2, num_layers_per_virtual_pipeline_stage=0),
            "--target-num-layers-per-virtual-pipeline-stage 0 is not positive",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_flags_of_the_converter(target: Target, expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        retarget(small_common(), target)
    assert expected in str(refused.value)
    assert "--tensor-model-parallel-size" not in str(refused.value)


def write(directory: Path) -> Path:
    folder = directory / "iter_0000003"
    folder.mkdir()
    (folder / "file").write_text("new")
    (directory / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def accept(folder: Path) -> None:
    assert (folder / "file").read_text() == "new"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_appears_beside_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert publish_checked(tmp_path, 3, write, accept, print) == tmp_path / "iter_0000003"
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_nothing_is_left_of_what_is_refused(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        accept(folder)
        raise CheckpointError("wrong")

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(CheckpointError, match="wrong"):
        publish_checked(tmp_path / "there", 3, write, refuse, print)
    assert names(tmp_path / "there") == ["latest_checkpointed_iteration.txt"]
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "2"
    with pytest.raises(CheckpointError, match="wrong"):
        publish_checked(tmp_path / "new" / "deeper", 3, write, refuse, print)
    assert names(tmp_path) == ["there"]


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write into --save-dir .*/file/deeper: Not a directory; use"):
        publish_checked(tmp_path / "file" / "deeper", 3, write, accept, print)


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(CheckpointError, match="iter_0000003 exists already; remove it"):
        publish_checked(tmp_path, 3, write, accept, print)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; pass a folder"):
        publish_checked(tmp_path / "file", 3, write, accept, print)


def test_leftovers_of_an_interrupted_conversion_go_and_a_running_one_is_left_alone(tmp_path: Path) -> None:
    staging = tmp_path / STAGING_FOLDER
    (staging / "iter_0000003").mkdir(parents=True)
    descriptor = os.open(staging, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another conversion is writing"):
        publish_checked(tmp_path, 3, write, accept, print)
    assert names(staging) == ["iter_0000003"]
    os.close(descriptor)
    lines: list[str] = []
    publish_checked(tmp_path, 3, write, accept, lines.append)
    assert "interrupted" in lines[0]
    assert names(tmp_path) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_a_folder_that_a_run_saves_into_is_refused(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    record = OwnerRecord(identify(owner.pid), None, "feed", "a training run")
    (tmp_path / ".owner.00000001").write_text(json.dumps(dataclasses.asdict(record)))
    with pytest.raises(FolderInUseError, match=rf"--save-dir {tmp_path} is in use by a training run on .* --save-dir$"):
        publish_checked(tmp_path, 3, write, accept, print)
    assert names(tmp_path) == [".owner.00000001"]
    owner.communicate()
    publish_checked(tmp_path, 3, write, accept, print)
    assert names(tmp_path) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_gpt2_files_need_no_tokenizer_type(tmp_path: Path) -> None:
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    vocabulary = {token: number for number, token in enumerate([*byte_characters(), END_OF_TEXT])}
    files["vocab_file"].write_text(json.dumps(vocabulary), encoding="utf-8")
    files["merge_file"].write_text("#version: 0.2\n", encoding="utf-8")
    source = MemorySource({}, {"config": {"model": {"vocab_size": 257}}})
    request = ConversionRequest(
        load_dir=tmp_path,
        save_dir=tmp_path,
        loader="megatron",
        saver="megatron",
        ckpt_step=None,
        target=Target(),
        true_vocab_size=None,
        tokenizer=files,
        told={},
        verify=False,
        test_logits=False,
    )
    write = tokenizer_writer(source, request)
    assert write is not None
    assert write(tmp_path)
    assert json.loads((tmp_path / TOKENIZER_FOLDER / RECORD_FILE).read_text())["tokenizer_type"] == "GPT2BPETokenizer"
    others = dataclasses.replace(request, tokenizer={**files, "tokenizer_model": files["vocab_file"]})
    with pytest.raises(TokenizerError, match=r"^--tokenizer-model has no effect: the tokenizer is GPT2BPETokenizer"):
        tokenizer_writer(source, others)
