"""Checkpoints that stay on the machines whose ranks wrote them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import checkpoint_folder
from megatron.checkpoint.checkpoint_folder import publish, saved_iterations
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.save import CommonState, prepare_save_directory
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing import shard_reader
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.errors import CheckpointError, StorageError
from megatron.core.object_store import ObjectStoreError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state, describe_parallel_state
from tests.harness.distributed import run_distributed
from tests.harness.saved_checkpoint import save_checkpoint
from tests.unit.core.dist_checkpointing.toy import assert_equal_runs, empty_run, filled_run

CONFIG = {"model": {"num_layers": 4}}
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """Make the folders of two machines, each with a directory of the same relative path."""
    made = [tmp_path / "first", tmp_path / "second"]
    for folder in made:
        folder.mkdir()
    return made


def enter_machine(machines: list[str], tp: int) -> ParallelState:
    """Go to the folder of this rank's machine; the first half of the ranks is on the first one."""
    state = create_parallel_state(ParallelSizes(tp=tp))
    os.chdir(machines[state.rank * 2 // state.world_size])
    return state


def content(state: ParallelState, run: CheckpointState, iteration: int) -> CommonState:
    return CommonState(progress=TrainProgress(iteration=iteration), config=CONFIG, write_tokenizer=write_tokenizer)


def write_tokenizer(folder: Path) -> None:
    (folder / "vocab.json").write_text("{}")


def save(machines: list[str], tp: int, iterations: tuple[int, ...], keep_last: int | None = None) -> None:
    state = enter_machine(machines, tp)
    folders = prepare_save_directory("run", state, lambda line: None)
    assert not folders.is_shared
    options = CheckpointConfig(keep_last=keep_last)
    for iteration in iterations:
        run = filled_run(state)
        save_checkpoint("run", run, content(state, run, iteration), state, options, lambda line: None, folders)
    folders.release()


def load(machines: list[str], tp: int, same_layout: bool = True) -> tuple[int | None, str, list[str]]:
    """Prepare and load; return the iteration, the error and the log."""
    state = enter_machine(machines, tp)
    lines: list[str] = []
    try:
        prepare_save_directory("run", state, lines.append).release()
        run = empty_run(state)
        loaded = load_checkpoint("run", run, state, CheckpointConfig(), CONFIG, lines.append)
    except CheckpointError as error:
        return None, str(error), lines
    if loaded is None:
        return None, "", lines
    expected = filled_run(state)
    assert_equal_runs(run, expected)
    if same_layout:
        assert loaded.rng is not None
        assert all(torch.equal(loaded.rng[name], tensor) for name, tensor in expected.rng.items())
    return loaded.progress.iteration, "", lines


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def on(machines: list[Path]) -> list[str]:
    return [str(machine) for machine in machines]


@pytest.mark.default(1)
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_machine_holds_its_ranks_files_and_loads_again(tp: int, machines: list[Path]) -> None:
    run_distributed(4, save, on(machines), tp, (10, 20, 30), 2)
    for number, machine in enumerate(machines):
        assert names(machine / "run") == ["iter_0000020", "iter_0000030", TRACKER]
        shards = [f"shard_{rank:05d}.safetensors" for rank in (2 * number, 2 * number + 1)]
        assert names(machine / "run" / "iter_0000030") == ["index.json", *shards, "tokenizer"]
        assert names(machine / "run" / "iter_0000030" / "tokenizer") == ["vocab.json"]
    first, second = ((machine / "run" / "iter_0000030" / "index.json").read_bytes() for machine in machines)
    assert first == second
    for iteration, error, _ in run_distributed(4, load, on(machines), tp):
        assert (iteration, error) == (30, "")


@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 1), pytest.param(4, 4, marks=pytest.mark.long)])
def test_another_layout_on_the_same_machines_reads_over_the_network(
    num_ranks: int, tp: int, machines: list[Path]
) -> None:
    run_distributed(4, save, on(machines), 2, (10,))
    for iteration, error, _ in run_distributed(num_ranks, load, on(machines), tp, False):
        assert (iteration, error) == (10, "")


def load_while_nobody_answers(machines: list[str], failure: OSError, at: str) -> tuple[str, list[str]]:
    """Load where the files of other machines cannot be read, or looked for; return the error and the log."""
    state = enter_machine(machines, 1)

    def fail(*_: object, **__: object) -> bytes:
        raise failure

    if at == "read":
        shard_reader.read_range = fail  # type: ignore[attr-defined]
    elif state.rank == 1:
        exists = Path.exists
        # Of this rank alone: the other one has to hear of it.
        Path.exists = lambda path, **_: fail() if path.suffix == ".safetensors" else exists(path)  # type: ignore[method-assign,assignment]
    lines: list[str] = []
    with pytest.raises(StorageError) as caught:
        load_checkpoint("run", empty_run(state), state, CheckpointConfig(), CONFIG, lines.append)
    return str(caught.value), lines


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("failure", "at"),
    [
        (ObjectStoreError(errno.EIO, "reset by peer", "s3://bucket/run/shard"), "read"),
        pytest.param(OSError(errno.ESTALE, "Stale file handle"), "read", marks=pytest.mark.long),
        (ObjectStoreError(errno.EIO, "reset by peer", "s3://bucket/run/shard"), "look"),
    ],
)
def test_storage_that_does_not_answer_is_no_damage(failure: OSError, at: str, machines: list[Path]) -> None:
    run_distributed(4, save, on(machines), 2, (10, 20))
    for error, lines in run_distributed(2, load_while_nobody_answers, on(machines), failure, at):
        assert str(failure.strerror) in error
        assert not any("falling back" in line for line in lines)


def test_files_copied_together_are_an_ordinary_checkpoint(machines: list[Path]) -> None:
    run_distributed(4, save, on(machines), 2, (10,))
    for shard in (machines[1] / "run" / "iter_0000010").glob("*.safetensors"):
        shutil.copy(shard, machines[0] / "run" / "iter_0000010")
    run = empty_run(describe_parallel_state(0, 1))
    state = describe_parallel_state(0, 1)
    loaded = load_checkpoint(machines[0] / "run", run, state, CheckpointConfig(), CONFIG, lambda line: None)
    assert loaded is not None
    assert_equal_runs(run, filled_run(state))


def test_a_byte_that_no_machine_has_is_refused_by_the_name_of_its_file(machines: list[Path]) -> None:
    run_distributed(4, save, on(machines), 2, (10,))
    (machines[1] / "run" / "iter_0000010" / "shard_00003.safetensors").unlink()
    for iteration, error, _ in run_distributed(4, load, on(machines), 2):
        assert iteration is None
        assert error.startswith("run/iter_0000010/shard_00003.safetensors: No such file or directory; lost: ")


def test_a_byte_that_was_changed_on_another_machine_is_found(machines: list[Path]) -> None:
    run_distributed(4, save, on(machines), 2, (10, 20))
    path = machines[1] / "run" / "iter_0000020" / "shard_00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for iteration, error, lines in run_distributed(4, load, on(machines), 2):
        assert (iteration, error) == (10, "")
        assert any("is damaged" in line and "shard_00002" in line for line in lines)


def test_the_first_machine_without_its_folder_is_refused(machines: list[Path]) -> None:
    run_distributed(4, save, on(machines), 2, (10,))
    shutil.rmtree(machines[0] / "run")
    for iteration, error, _ in run_distributed(4, load, on(machines), 2):
        assert iteration is None
        assert error.startswith("rank 2 finds checkpoints in run, but rank 0, on a different node, finds none; ")


def die_while_publishing(machines: list[str], tp: int, publisher: int | None) -> str:
    """Save twice; the second time one leader publishes, or none, and the others are stopped before they do."""
    save(machines, tp, (10,))
    state = create_parallel_state(ParallelSizes(tp=tp))

    def publish_or_stop(directory: Path, iteration: int, token: str) -> None:
        if state.rank != publisher:
            os._exit(0)
        publish(directory, iteration, token)
        os._exit(0)

    checkpoint_folder.publish = publish_or_stop  # type: ignore[attr-defined]
    save(machines, tp, (20,))
    return "saved"


@pytest.mark.default(1)
@pytest.mark.parametrize("publisher", [*(pytest.param(each, marks=pytest.mark.long) for each in (None, 2)), 0])
def test_what_one_machine_published_before_an_interruption_the_others_publish_too(
    publisher: int | None, machines: list[Path]
) -> None:
    with pytest.raises(AssertionError):
        run_distributed(4, die_while_publishing, on(machines), 2, publisher)
    expected = 10 if publisher is None else 20
    published = [20 in saved_iterations(machine / "run") for machine in machines]
    assert published == [publisher == 0, publisher == 2]
    for iteration, error, _ in run_distributed(4, load, on(machines), 2):
        assert (iteration, error) == (expected, "")
    for machine in machines:
        assert [name for name in names(machine / "run") if name.startswith(".")] == []
        assert (machine / "run" / TRACKER).read_text() == str(expected)


def test_a_machine_that_cannot_write_costs_the_others_nothing(machines: list[Path]) -> None:
    for _, error in run_distributed(4, fail_on_second_machine, on(machines), 2):
        assert error.startswith("cannot write run/.iter_0000020.")
    assert names(machines[0] / "run") == ["iter_0000010", TRACKER]
    for iteration, error, _ in run_distributed(4, load, on(machines), 2):
        assert (iteration, error) == (10, "")


def fail_on_second_machine(machines: list[str], tp: int) -> tuple[int, str]:
    save(machines, tp, (10,))
    state = create_parallel_state(ParallelSizes(tp=tp))
    folders = prepare_save_directory("run", state, lambda line: None)
    if state.rank == 2:
        os.rename("run", "kept")
        Path("run").touch()
    try:
        run = filled_run(state)
        save_checkpoint("run", run, content(state, run, 20), state, CheckpointConfig(), lambda line: None, folders)
    except CheckpointError as error:
        if state.rank == 2:
            os.unlink("run")
            os.rename("kept", "run")
        folders.release()
        return state.rank, str(error)
    return state.rank, "saved"
