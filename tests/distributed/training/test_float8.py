"""fp8 at every layout against one process: losses, amax histories, resumed and recomputed runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.native import NativeSource
from megatron.cli import convert
from tests.distributed.training.float8_runs import RECIPES, SHAPE, Float8Runs, losses, scaling
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.forked_training import fork_training

SAME = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2-sharded": (2, "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
}
"""Layouts in which every product has the operands of one process."""
CUT = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, "--context-parallel-size 2"),
}
"""Layouts that sum in another order, and so round some numbers to a neighbor in bfloat16 and in fp8."""
TOLERANCE = 2e-3
"""Measured: 8e-4 at most over these recipes and layouts, where bfloat16 alone has 8e-5."""
AMAX_TOLERANCE = 0.15
"""Measured: 0.12 at most. Gradients are sums of numbers of three bits (E5M2), of which some round to a neighbor."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Float8Runs:
    return Float8Runs(tmp_path_factory.mktemp("float8"))


DEFAULT = {("mxfp8", "tp2-sp"), *(("delayed", name) for name in (*SAME, "tp2-sp"))}
"""Recipes at layouts that the default tests have."""


def some_of(layouts: dict[str, tuple[int, str]]) -> pytest.MarkDecorator:
    """Return each recipe at each layout: those of the default tests, and the rest of the long ones."""
    cells = [(recipe, layout) for recipe in RECIPES for layout in layouts]
    return pytest.mark.parametrize(
        ("recipe", "layout"),
        [pytest.param(*cell, marks=() if cell in DEFAULT else pytest.mark.long) for cell in cells],
    )


@pytest.mark.default(1)
@some_of(SAME)
def test_layouts_that_sum_alike_give_the_same_bits(train, recipe: str, layout: str) -> None:
    reference, _ = train(f"--fp8-recipe {recipe}")
    num_processes, flags = SAME[layout]
    run, _ = train(f"--fp8-recipe {recipe} {flags}", num_processes)
    assert losses(run) == losses(reference)


@pytest.mark.default(1)
@some_of(CUT)
def test_layouts_that_cut_products_agree_within_roundings(train, recipe: str, layout: str) -> None:
    reference, _ = train(f"--fp8-recipe {recipe}")
    num_processes, flags = CUT[layout]
    run, _ = train(f"--fp8-recipe {recipe} {flags}", num_processes)
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "layout", [*SAME, "tp2-sp", *(pytest.param(layout, marks=pytest.mark.long) for layout in ("tp2", "cp2"))]
)
def test_histories_are_those_of_one_process(train, layout: str) -> None:
    expected = scaling(train("--fp8-recipe delayed")[1])
    num_processes, flags = (SAME | CUT)[layout]
    found = scaling(train(f"--fp8-recipe delayed {flags}", num_processes)[1])
    assert expected["amax_history"].shape == (2, 4, 3, 4)
    assert torch.all(expected["amax_history"] > 0)
    for name, values in expected.items():
        if layout in SAME:
            assert torch.equal(found[name], values)
    torch.testing.assert_close(found["amax_history"], expected["amax_history"], rtol=AMAX_TOLERANCE, atol=0)


@pytest.mark.full
def test_weights_that_are_gathered_in_fp8_are_those_of_the_products(train) -> None:
    reference, _ = train("--fp8-recipe tensorwise")
    run, checkpoints = train("--fp8-recipe tensorwise --use-distributed-optimizer --fp8-param-gather", 2)
    assert losses(run)[:6] == losses(reference)[:6]
    weight = NativeSource(newest(checkpoints)).read("model.decoder.layers.1.mlp.linear_fc1.weight").float()
    mantissas = torch.frexp(weight).mantissa * 16
    assert torch.equal(mantissas, mantissas.round())
    plain = NativeSource(newest(checkpoints)).read("model.embedding.word_embeddings.weight").float()
    assert not torch.equal(torch.frexp(plain).mantissa * 16, (torch.frexp(plain).mantissa * 16).round())


@pytest.mark.default(1)
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("rowwise", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        pytest.param("--recompute-granularity selective", marks=pytest.mark.long),
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
    ],
)
def test_recomputed_and_deferred_passes_change_nothing(train, recipe: str, flags: str) -> None:
    reference, checkpoints = train(f"--fp8-recipe {recipe}")
    run, others = train(f"--fp8-recipe {recipe} {flags}", 2 if "pipeline" in flags else 1)
    assert losses(run) == losses(reference)
    if recipe == "delayed":
        expected = scaling(checkpoints)
        assert all(torch.equal(values, expected[name]) for name, values in scaling(others).items())


@pytest.mark.default(1)
@pytest.mark.parametrize("flags", ["--no-fp8-wgrad", "--fp8-margin 4", "--first-last-layers-bf16", "--fp8-interval 5"])
def test_each_choice_changes_what_is_computed(train, flags: str) -> None:
    more = "--num-layers-at-end-in-bf16 0" if flags == "--first-last-layers-bf16" else ""
    reference, _ = train("--fp8-recipe delayed")
    run, _ = train(f"--fp8-recipe delayed {flags} {more}")
    assert losses(run) != losses(reference)
    assert losses(run) == pytest.approx(losses(reference), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.long), "tp2-sp"])
def test_a_resumed_run_is_the_run_that_went_on(tmp_path: Path, train, layout: str) -> None:
    num_processes, flags = {"one": (1, ""), **CUT}[layout]
    whole, checkpoints = train(f"--fp8-recipe delayed {flags}", num_processes)
    words = toy_args(tmp_path, SHAPE, "--fp8-format hybrid --fp8-recipe delayed", flags)
    fork_training([*words, "--exit-interval", "3"], num_processes).check()
    second = fork_training(words, num_processes).check()
    assert exact_figures(second.iterations()) == exact_figures(whole.iterations())
    assert_same_checkpoints(newest(tmp_path / "checkpoints"), newest(checkpoints))


@pytest.mark.full
@pytest.mark.parametrize("checkpoint_format", [pytest.param("torch", marks=pytest.mark.long), "torch_dist"])
def test_megatrons_formats_keep_the_histories(tmp_path: Path, train, checkpoint_format: str) -> None:
    whole, _ = train("--fp8-recipe delayed")
    words = toy_args(tmp_path, SHAPE, f"--fp8-format hybrid --ckpt-format {checkpoint_format}")
    fork_training([*words, "--exit-interval", "3"]).check()
    second = fork_training([*words, "--pipeline-model-parallel-size", "2"], 2).check()
    again, at_once = second.iterations(), whole.iterations()
    # The stages' parts of a norm are added in another order than all of them by one process.
    norms = [line.pop("grad_norm") for line in again]
    assert norms == pytest.approx([line.pop("grad_norm") for line in at_once], rel=1e-14)
    assert exact_figures(again) == exact_figures(at_once)


def test_a_converted_checkpoint_leaves_the_scales_out(tmp_path: Path, train) -> None:
    _, checkpoints = train("--fp8-recipe delayed")
    for saver in ("torch", "torch_dist", "native"):
        folders = ["--load-dir", str(checkpoints), "--save-dir", str(tmp_path / saver)]
        assert convert.main([*folders, "--loader", "native", "--saver", saver]) == 0
        assert newest(tmp_path / saver).is_dir()


@pytest.mark.full
def test_scales_go_on_at_another_layout_and_begin_anew_at_another_length(tmp_path: Path, train) -> None:
    _, checkpoints = train("--fp8-recipe delayed")
    more = f"--load {checkpoints} --fp8-format hybrid --train-iters 7 --override-opt-param-scheduler"
    more += f" --metrics-jsonl {tmp_path / 'metrics.jsonl'}"
    figures = []
    for flags, num_processes in (("", 1), ("--pipeline-model-parallel-size 2", 2), ("--use-distributed-optimizer", 2)):
        done = fork_training(toy_args(tmp_path, SHAPE, more, flags, save=False), num_processes).check()
        assert "begin anew" not in done.stdout
        figures.append([line["lm_loss"] for line in done.iterations()])
    assert figures[0] == figures[1] == figures[2]
    done = fork_training(toy_args(tmp_path, SHAPE, more, "--fp8-amax-history-len 2", save=False)).check()
    assert "fp8: scales and amax histories begin anew, since those of the checkpoint have another" in done.stdout
