"""fp8 in layers of experts and of latent attention: layouts against one process, recompute, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.native import NativeSource
from tests.distributed.training.float8_runs import RECIPES, SHAPE, Float8Runs, losses, scaling
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.forked_training import fork_training

EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 96 --moe-layer-freq [0,1]"""
LATENT = """--multi-latent-attention --position-embedding-type rope --q-lora-rank 48 --kv-lora-rank 16 --qk-head-dim 24
    --qk-pos-emb-head-dim 16 --v-head-dim 8 --qk-layernorm"""
FURTHER = "--mtp-num-layers 2 --position-embedding-type rope"
KINDS = {"experts": EXPERTS, "latent": LATENT, "both": f"{EXPERTS} {LATENT}", "further": FURTHER}
TP2 = "--tensor-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
SAME = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2-sharded": (2, "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
}
"""Layouts in which every product has the operands of one process."""
CUT = {
    "tp2": (2, TP2),
    "tp2-sp": (2, f"{TP2} --sequence-parallel"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (2, f"{EP2} --use-distributed-optimizer"),
    "tp2-ep2-etp1": (2, f"{TP2} --sequence-parallel {EP2} --expert-tensor-parallel-size 1"),
}
"""Layouts that sum in another order; at ep2 an expert is given the rows of two ranks' micro-batches at once."""
TOLERANCE = 2e-3
"""Measured: 9.5e-4 at most over these kinds, recipes and layouts, where bfloat16 alone has 2e-4."""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MODULES = "--recompute-granularity selective --recompute-modules"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Float8Runs:
    return Float8Runs(tmp_path_factory.mktemp("float8"))


def cells(layouts: dict[str, tuple[int, str]], *default: tuple[str, str, str]) -> pytest.MarkDecorator:
    """Return each kind in each recipe at each layout that it has: those named are default tests, the rest long."""
    every = [
        (kind, recipe, layout)
        for kind in KINDS
        for recipe in RECIPES
        for layout in layouts
        if kind in ("experts", "both") or "ep2" not in layout
    ]
    return pytest.mark.parametrize(
        ("kind", "recipe", "layout"),
        [pytest.param(*cell, marks=() if cell in default else pytest.mark.long) for cell in every],
    )


@cells(SAME)
def test_layouts_that_sum_alike_give_the_same_bits(train: Float8Runs, kind: str, recipe: str, layout: str) -> None:
    reference, checkpoints = train(f"--fp8-recipe {recipe} {KINDS[kind]}")
    num_processes, flags = SAME[layout]
    run, others = train(f"--fp8-recipe {recipe} {KINDS[kind]} {flags}", num_processes)
    assert losses(run) == losses(reference)
    if recipe == "delayed":
        expected = scaling(checkpoints)
        assert all(torch.equal(values, expected[name]) for name, values in scaling(others).items())


@cells(CUT)
def test_layouts_that_cut_products_agree_within_roundings(
    train: Float8Runs, kind: str, recipe: str, layout: str
) -> None:
    reference, _ = train(f"--fp8-recipe {recipe} {KINDS[kind]}")
    num_processes, flags = CUT[layout]
    run, _ = train(f"--fp8-recipe {recipe} {KINDS[kind]} {flags}", num_processes)
    apart = max(abs(one / other - 1) for one, other in zip(losses(run), losses(reference)))
    print(f"{kind}, {recipe}, {layout}: {apart:.1e}")
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE)


def first_amaxes(train: Float8Runs, kind: str, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the amaxes of the first step at a layout and of one process.

    Shapes: ``-> [layers, places, 3]`` twice.
    """
    one_step = f"--fp8-recipe delayed --train-iters 1 --lr-warmup-iters 0 {KINDS[kind]}"
    num_processes, flags = CUT[layout]
    ranks, one = (scaling(train(words, n)[1]) for words, n in ((f"{one_step} {flags}", num_processes), (one_step, 1)))
    return ranks["amax_history"][..., 0], one["amax_history"][..., 0]


@pytest.mark.full
def test_experts_on_two_ranks_have_the_amaxes_of_one_process(train: Float8Runs) -> None:
    """They are equal as long as the weights are: which rank multiplies a row does not change it."""
    found, expected = first_amaxes(train, "both", "ep2")
    # Seven linear layers (five of attention), and two for each of four experts.
    assert expected.shape == (2, 7 + 2 * 4, 3)
    assert torch.equal(found, expected)
    assert (expected[0, :7] > 0).all()
    assert not expected[0, 7:].any()
    assert (expected[1] > 0).all()


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2", "tp2-ep2-etp1"])
def test_amaxes_differ_by_roundings_alone(train: Float8Runs, layout: str) -> None:
    """Those of weights are equal; others follow sums in another order, and a choice between nearly equal experts."""
    found, expected = first_amaxes(train, "both", layout)
    assert torch.equal(found[..., 1], expected[..., 1])
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0)


@pytest.mark.parametrize(
    ("kind", "recipe", "flags"),
    [
        pytest.param(*cell, marks=pytest.mark.long)
        for cell in (
            *(("both", recipe, FULL) for recipe in RECIPES),
            *(("both", recipe, f"{MODULES} mla_up_proj moe_act layernorm core_attn") for recipe in RECIPES),
            *(("both", recipe, f"{MODULES} moe mla_up_proj shared_experts") for recipe in ("delayed", "mxfp8")),
            ("latent", "delayed", "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
            ("both", "delayed", "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
            *(("further", recipe, FULL) for recipe in RECIPES),
            ("further", "delayed", f"{MODULES} layernorm core_attn mlp"),
            ("further", "mxfp8", f"{MODULES} layernorm core_attn mlp"),
            ("further", "delayed", "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
            ("further", "rowwise", "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
            ("latent", "delayed", "--cpu-offloading --cpu-offloading-num-layers 1"),
        )
    ],
)
def test_recomputed_deferred_and_offloaded_passes_change_nothing(
    train: Float8Runs, kind: str, recipe: str, flags: str
) -> None:
    reference, checkpoints = train(f"--fp8-recipe {recipe} {KINDS[kind]}")
    run, others = train(f"--fp8-recipe {recipe} {KINDS[kind]} {flags}", 2 if "pipeline" in flags else 1)
    assert losses(run) == losses(reference)
    if recipe == "delayed":
        expected = scaling(checkpoints)
        assert all(torch.equal(values, expected[name]) for name, values in scaling(others).items())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["both", "latent"])
def test_recompute_under_sequence_parallelism_changes_nothing(train: Float8Runs, kind: str) -> None:
    flags = f"--fp8-recipe delayed {KINDS[kind]} {TP2} --sequence-parallel"
    (reference, checkpoints), (run, others) = (
        train(f"{flags} {more}", 2) for more in ("", f"{MODULES} mla_up_proj layernorm core_attn")
    )
    assert losses(run) == losses(reference)
    expected = scaling(checkpoints)
    assert all(torch.equal(values, expected[name]) for name, values in scaling(others).items())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "layout"), [("both", "ep2"), ("both", "tp2-ep2-etp1"), ("further", "tp2-sp")])
def test_a_resumed_run_is_the_run_that_went_on(tmp_path: Path, train: Float8Runs, kind: str, layout: str) -> None:
    num_processes, flags = CUT[layout]
    whole, checkpoints = train(f"--fp8-recipe delayed {KINDS[kind]} {flags}", num_processes)
    words = toy_args(tmp_path, SHAPE, "--fp8-format hybrid", KINDS[kind], flags)
    fork_training([*words, "--exit-interval", "3"], num_processes).check()
    second = fork_training(words, num_processes).check()
    assert exact_figures(second.iterations()) == exact_figures(whole.iterations())
    assert_same_checkpoints(newest(tmp_path / "checkpoints"), newest(checkpoints))


@pytest.mark.long
@pytest.mark.parametrize("saved_as", ["native", "torch", "torch_dist"])
@pytest.mark.parametrize("kind", ["both", "further"])
def test_histories_follow_their_layers_to_any_layout(
    tmp_path: Path, train: Float8Runs, kind: str, saved_as: str
) -> None:
    """What a step adds stands in front of the saved histories, wherever the layers and experts are now."""
    others = "" if saved_as == "native" else f"--ckpt-format {saved_as}"
    at_saved = CUT["ep2"][1] if kind == "both" else SAME["pp2"][1]
    of_saved = f"{at_saved} --fp8-recipe delayed {KINDS[kind]}"
    _, checkpoints = train(f"{of_saved} {others}", 2)
    reference = scaling(train(of_saved, 2)[1])["amax_history"]
    more = f"--load {checkpoints} --fp8-format hybrid {KINDS[kind]} --train-iters 7 --override-opt-param-scheduler"
    layouts = {"one": (1, ""), **SAME, "tp2-sp": CUT["tp2-sp"], "tp2": CUT["tp2"]}
    if kind == "both":
        layouts["tp2-ep2-etp1"] = CUT["tp2-ep2-etp1"]
    figures = {}
    for name, (num_processes, flags) in layouts.items():
        folder = tmp_path / name
        folder.mkdir()
        words = toy_args(
            folder, SHAPE, more, flags, f"--save {folder / 'saved'} --metrics-jsonl", folder / "m", save=False
        )
        done = fork_training(words, num_processes).check()
        assert "start from their initial values" not in done.stdout
        figures[name] = losses(done)
        history = scaling(folder / "saved")["amax_history"]
        assert torch.equal(history[..., 1:], reference[..., :-1])
    assert figures["one"] == figures["pp2"] == figures["dp2-sharded"]
    assert all(figures["one"] == pytest.approx(each, rel=TOLERANCE) for each in figures.values())


SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
GATHERED = {
    "dp2": (2, SHARDED),
    "dp4-ep2": (4, f"{EP2} {SHARDED} --ddp-bucket-size 3000"),
    "dp4-ep2-piecewise": (4, f"{EP2} {SHARDED} --overlap-param-gather-with-optimizer-step --ddp-bucket-size 3000"),
    "tp2-ep2-etp1": (4, f"{TP2} --sequence-parallel {EP2} --expert-tensor-parallel-size 1 {SHARDED}"),
    "tp2-ep2": (4, f"{TP2} --sequence-parallel {EP2} --expert-tensor-parallel-size 2 {SHARDED}"),
    "dp4-ep2-gradients": (4, f"{EP2} {SHARDED} --data-parallel-sharding-strategy optim_grads"),
    "dp4-copies": (4, f"{SHARDED} --num-distributed-optimizer-instances 2"),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [layout if layout == "dp2" else pytest.param(layout, marks=pytest.mark.long) for layout in GATHERED]
)
def test_experts_weights_that_are_gathered_in_fp8_are_those_of_their_products(train: Float8Runs, layout: str) -> None:
    """Each expert's scale is that of its own product, so that the product rounds nothing more."""
    num_processes, flags = GATHERED[layout]
    flags = f"--fp8-recipe tensorwise --global-batch-size 8 {EXPERTS} {flags}"
    reference, _ = train(flags, num_processes)
    run, checkpoints = train(f"{flags} --fp8-param-gather", num_processes)
    assert losses(run)[:6] == losses(reference)[:6]
    source = NativeSource(newest(checkpoints))
    names = [name for name in source.tensors if "experts.linear_fc" in name and name.startswith("model.")]
    names = [name for name in names if name.endswith("weight") and "shared" not in name]
    assert len(names) == 2
    for name in names:
        mantissas = torch.frexp(source.read(name).float()).mantissa * 16
        # Where experts have one copy, nobody gathers them.
        assert torch.equal(mantissas, mantissas.round()) == (layout != "tp2-ep2"), name


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_experts_agree_with_one_process_in_every_recipe(train: Float8Runs, recipe: str) -> None:
    num_processes, flags = GATHERED["dp4-ep2"]
    given = f"--fp8-recipe {recipe} --global-batch-size 8 {KINDS['both']}"
    reference, _ = train(given)
    run, _ = train(f"{given} {flags} --fp8-param-gather", num_processes)
    apart = max(abs(one / other - 1) for one, other in zip(losses(run), losses(reference)))
    print(f"{recipe}: {apart:.1e}")
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("saved_as", ["native", "torch", "torch_dist"])
def test_gathered_experts_go_on_at_any_layout(tmp_path: Path, train: Float8Runs, saved_as: str) -> None:
    """A resumed run is the run that went on; elsewhere its first loss is that of the same weights."""
    others = "" if saved_as == "native" else f"--ckpt-format {saved_as}"
    num_processes, flags = GATHERED["dp4-ep2"]
    given = f"--fp8-recipe delayed --global-batch-size 8 {EXPERTS} {others}"
    whole, _ = train(f"{given} {flags} --fp8-param-gather --save-interval 3", num_processes)
    _, checkpoints = train(f"{given} {flags} --fp8-param-gather --exit-interval 3", num_processes)
    for name, (number, at) in {**GATHERED, "one": (1, "")}.items():
        folder = tmp_path / name
        folder.mkdir()
        gathers = "" if name == "one" else "--fp8-param-gather"
        more = f"--load {checkpoints} --fp8-format hybrid {given} {at} {gathers} --metrics-jsonl"
        done = fork_training(toy_args(folder, SHAPE, more, folder / "metrics", save=False), number).check()
        assert "start from their initial values" not in done.stdout
        found, expected = ([line["lm_loss"] for line in run.iterations()[-3:]] for run in (done, whole))
        if name == "dp4-ep2":
            assert found == expected
        assert found == pytest.approx(expected, rel=TOLERANCE), name


@pytest.mark.long
def test_gathered_weights_of_latent_attention_may_travel_in_fp8(train: Float8Runs) -> None:
    flags = f"--fp8-recipe tensorwise {LATENT} --use-distributed-optimizer"
    reference, _ = train(flags, 2)
    run, _ = train(f"{flags} --fp8-param-gather", 2)
    assert losses(run)[:2] == losses(reference)[:2]
