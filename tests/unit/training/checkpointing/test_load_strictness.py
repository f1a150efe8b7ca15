"""Loading into another model: what is refused, what is let through, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.load import load_checkpoint
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import ParamSpec, attach_spec, full_pieces
from tests.harness.saved_checkpoint import save_checkpoint
from tests.unit.core.dist_checkpointing.toy import ToyModel, ToyOptimizer, empty_run, filled_run
from tests.unit.training.checkpointing.toy_checkpoint import CONFIG, STATE, common, flip_byte, load, save

MISSING = "missing in the checkpoint: model.new.weight"
UNEXPECTED = "unexpected in the checkpoint: model.norm.weight"


def test_another_model_is_refused_and_not_taken_for_damage(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    save(tmp_path, 20, lines)
    other = {"model": {"num_layers": 6, "hidden_size": 7}, "optimizer": {"lr": 1e-4}}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, lines, config=other)
    assert "model.num_layers: 4 -> 6" in str(caught.value)
    assert "model.hidden_size: 5 -> 7" in str(caught.value)
    assert not any("falling back" in line for line in lines)


def test_a_tokenizer_smaller_than_the_model_is_told_what_to_add(tmp_path: Path, lines: list[str]) -> None:
    content = common(10, config={"model": {"vocab_size": 151936}})
    save_checkpoint(tmp_path, filled_run(STATE), content, STATE, CheckpointConfig(), lines.append)
    with pytest.raises(CheckpointError, match=r"vocab_size: 151936 -> 151665 \(.* add --extra-vocab-size 271\)$"):
        load(tmp_path, lines, config={"model": {"vocab_size": 151665}})
    with pytest.raises(CheckpointError, match=r"vocab_size: 151936 -> 160000$"):
        load(tmp_path, lines, config={"model": {"vocab_size": 160000}})


class LargerToyModel(ToyModel):
    """Have one weight more than the model that is saved, and one less."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__(state)
        spec = ParamSpec("new.weight", (3,), full_pieces((3,)))
        parameter = torch.nn.Parameter(torch.full((3,), 5.0))
        attach_spec(parameter, spec)
        self.register_parameter("new", parameter)
        del self.p4


@pytest.mark.parametrize(
    ("choice", "refused", "listed"),
    [
        (
            "raise_all",
            [MISSING, UNEXPECTED],
            [],
        ),
        ("raise_unexpected", [MISSING], []),
        ("assume_ok_unexpected", [MISSING], []),
        ("log_all", [], ["model.new.weight", "model.norm.weight"]),
        ("return_all", [], ["model.new.weight", "model.norm.weight"]),
        ("log_unexpected", [], ["model.new.weight"]),
        ("return_unexpected", [], ["model.new.weight"]),
        ("ignore_all", [], ["model.new.weight"]),
    ],
)
def test_strictness(tmp_path: Path, lines: list[str], choice: str, refused: list[str], listed: list[str]) -> None:
    save(tmp_path, 10, lines)
    run = CheckpointState(models=[LargerToyModel(STATE)], optimizer=ToyOptimizer(STATE), rng=empty_run(STATE).rng)
    options = CheckpointConfig(dist_ckpt_strictness=choice)
    if refused:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path, run, STATE, options, CONFIG, lines.append)
        assert str(caught.value).partition(" does not fit this run: ")[2].split("; ") == refused
        return
    assert load_checkpoint(tmp_path, run, STATE, options, CONFIG, lines.append) is not None
    assert [line.strip() for line in lines if line.startswith("    model.")] == listed
    assert "WARNING: the checkpoint lacks 1 tensors of this run; left at their initial value:" in lines
    model = run.models[0]
    assert (model.new == 5).all()
    assert torch.equal(model.p1, filled_run(STATE).models[0].p1)


def test_values_of_a_damaged_checkpoint_do_not_pass_for_initial_ones(tmp_path: Path, lines: list[str]) -> None:
    def larger() -> CheckpointState:
        return CheckpointState(models=[LargerToyModel(STATE)])

    save(tmp_path, 10, lines)
    save(tmp_path, 20, lines, larger())
    flip_byte(tmp_path / "iter_0000020")
    options = {"dist_ckpt_strictness": "log_all", "no_load_optim": True}
    with pytest.raises(
        CheckpointError, match=r"iter_0000010 lacks model\.new\.weight, which the damaged one"
    ) as caught:
        load_checkpoint(tmp_path, larger(), STATE, CheckpointConfig(**options), CONFIG, lines.append)
    assert "--ckpt-step" in str(caught.value)
    run = larger()
    chosen = CheckpointConfig(ckpt_step=10, **options)
    assert load_checkpoint(tmp_path, run, STATE, chosen, CONFIG, lines.append) is not None
    assert (run.models[0].new == 5).all()


def test_another_shape_is_refused_however_lenient_the_load(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    longer = ToyModel(STATE)
    longer.p1 = torch.nn.Parameter(torch.zeros(9))
    attach_spec(longer.p1, ParamSpec("norm.weight", (9,), full_pieces((9,))))
    options = CheckpointConfig(dist_ckpt_strictness="ignore_all", no_load_optim=True)
    with pytest.raises(CheckpointError, match=r"shape \[.*\] in the checkpoint, \[9\] in this run"):
        load_checkpoint(tmp_path, CheckpointState(models=[longer]), STATE, options, CONFIG, lines.append)


def test_weights_of_another_precision_are_converted_and_that_is_said(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 10, lines)
    wide = CheckpointState(models=[ToyModel(STATE, torch.float32)])
    load_checkpoint(tmp_path, wide, STATE, CheckpointConfig(no_load_optim=True), CONFIG, lines.append)
    for ours, theirs in zip(wide.models[0].parameters(), saved.models[0].parameters()):
        assert torch.equal(ours, theirs.float())
    (line,) = [line for line in lines if line.startswith("precision: ")]
    assert "weights are bfloat16, this run's float32: converted from its weights" in line


def test_more_layers_are_refused_unless_that_is_asked_for(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    deeper = CONFIG | {"model": {"num_layers": 6, "hidden_size": 5}}
    with pytest.raises(CheckpointError, match=r"of another model .*: model\.num_layers: 4 -> 6$"):
        load(tmp_path, lines, config=deeper)
    load(tmp_path, lines, config=deeper, dist_ckpt_strictness="log_all")
    assert "configuration changed since the checkpoint: model.num_layers: 4 -> 6" in lines
    wider = CONFIG | {"model": {"num_layers": 4, "hidden_size": 7}}
    with pytest.raises(CheckpointError, match=r"of another model .*: model\.hidden_size: 5 -> 7$"):
        load(tmp_path, lines, config=wider, dist_ckpt_strictness="ignore_all")


def test_a_main_parameter_is_not_left_behind_its_weight(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    run = empty_run(STATE)
    assert isinstance(run.optimizer, ToyOptimizer)
    spec = ParamSpec("optimizer.main_param.norm.weight", (5,), full_pieces((5,)))
    run.optimizer.sharded_state()["main"] = (spec, torch.zeros(5))
    options = CheckpointConfig(dist_ckpt_strictness="log_all")
    with pytest.raises(CheckpointError, match=r"without their main parameters \(optimizer\.main_param\.norm\.weight\)"):
        load_checkpoint(tmp_path, run, STATE, options, CONFIG, lines.append)
