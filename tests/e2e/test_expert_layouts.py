"""A run with experts that is saved at one layout goes on at others, with the same state and the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.index import read_index
from tests.e2e.test_resume_layouts import (
    Layout,
    assert_goes_on_like,
    assert_same_content,
    copy_of_iteration_10,
    pass_through,
    train,
)
from tests.e2e.toy_run import newest
from tests.harness.forked_training import ForkedRun

EXPERTS = """
    --num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --swiglu --disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-shared-expert-intermediate-size 24 --moe-layer-freq ([0]+[1]*3) --moe-token-dispatcher-type alltoall
"""
FULLY_SHARDED = "--data-parallel-sharding-strategy optim_grads_params"
HOME = Layout(
    8, f"{EXPERTS} --expert-model-parallel-size 4 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
)
LAYOUTS = {
    "ep1": Layout(1, EXPERTS),
    "ep2-tp2": Layout(
        2,
        f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--sequence-parallel --use-distributed-optimizer",
    ),
    "ep2-tp2-cut-experts": Layout(
        4, f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "dp4-sharded-gradients": Layout(4, f"{EXPERTS} --data-parallel-sharding-strategy optim_grads"),
    "dp4-fully-sharded": Layout(4, f"{EXPERTS} {FULLY_SHARDED}"),
    "dp4-ep2-fully-sharded-in-copies": Layout(
        4, f"{EXPERTS} {FULLY_SHARDED} --expert-model-parallel-size 2 --num-distributed-optimizer-instances 2"
    ),
}
BY_DEFAULT = ("dp4-fully-sharded",)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ForkedRun]:
    """Return the checkpoints at iterations 10 and 20 of a run that was not interrupted, and the run."""
    folder = tmp_path_factory.mktemp("home")
    run = train(folder, HOME, "--save-interval 10")
    return folder / "checkpoints", run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in LAYOUTS]
)
def test_experts_are_loaded_and_saved_at_any_layout_bit_for_bit(
    home: tuple[Path, ForkedRun], name: str, tmp_path: Path
) -> None:
    copy_of_iteration_10(home[0], tmp_path)
    pass_through(LAYOUTS[name], tmp_path / "checkpoints", tmp_path / "there")
    assert_same_content(newest(tmp_path / "there"), newest(tmp_path / "checkpoints"))


FOREIGN = {
    "torch": ("ep2-tp2-cut-experts", "--ckpt-format torch"),
    "torch-distributed": ("home", "--ckpt-format torch"),
    "torch_dist": ("dp4-ep2-fully-sharded-in-copies", "--ckpt-format torch_dist"),
    "torch-sharded-weights": ("dp4-ep2-fully-sharded-in-copies", "--ckpt-format torch"),
    "torch_dist-cut": ("ep2-tp2", "--ckpt-format torch_dist"),
    "torch-cut": ("ep2-tp2", "--ckpt-format torch"),
}
CUT = {
    "tp2-ep2-dp2": "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "tp2-ep4-pp2-fully-sharded": f"""
        --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
        --pipeline-model-parallel-size 2 {FULLY_SHARDED}""",
    "tp4-ep2-etp2-dp2": """
        --tensor-model-parallel-size 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2
        --sequence-parallel --use-distributed-optimizer""",
}
"""Experts that are cut unlike other layers, on eight ranks."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "torch" else pytest.mark.long) for name in FOREIGN]
)
def test_experts_pass_through_megatrons_formats_bit_for_bit(
    home: tuple[Path, ForkedRun], name: str, tmp_path: Path
) -> None:
    copy_of_iteration_10(home[0], tmp_path)
    layout, form = FOREIGN[name]
    own = HOME if layout == "home" else LAYOUTS[layout]
    pass_through(Layout(own.num_processes, f"{own.flags} {form}"), tmp_path / "checkpoints", tmp_path / "there")
    assert not list((tmp_path / "there").rglob("*.safetensors"))
    pass_through(LAYOUTS["ep2-tp2"], tmp_path / "there", tmp_path / "back")
    assert_same_content(newest(tmp_path / "back"), newest(tmp_path / "checkpoints"))


@pytest.mark.long
@pytest.mark.parametrize("name", CUT)
def test_experts_cut_unlike_other_layers_have_files_of_megatron(
    home: tuple[Path, ForkedRun], name: str, tmp_path: Path
) -> None:
    copy_of_iteration_10(home[0], tmp_path)
    own = Layout(8, f"{EXPERTS} {CUT[name]} --ckpt-format torch")
    pass_through(own, tmp_path / "checkpoints", tmp_path / "there")
    assert list((tmp_path / "there").rglob("mp_rank_01*/*.pt"))
    pass_through(LAYOUTS["ep2-tp2"], tmp_path / "there", tmp_path / "back")
    assert_same_content(newest(tmp_path / "back"), newest(tmp_path / "checkpoints"))


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_latent_attention_and_further_tokens_pass_through_megatrons_formats(form: str, tmp_path: Path) -> None:
    latent = """
        --position-embedding-type rope --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6
        --qk-pos-emb-head-dim 4 --v-head-dim 5 --qk-layernorm --mtp-num-layers 1
    """
    train(tmp_path, Layout(1, f"{EXPERTS} {latent}"), "--exit-interval 10")
    spread = Layout(
        4,
        f"{EXPERTS} {latent} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        f"--expert-model-parallel-size 1 --ckpt-format {form}",
    )
    pass_through(spread, tmp_path / "checkpoints", tmp_path / "there")
    pass_through(Layout(2, f"{EXPERTS} {latent} {FULLY_SHARDED}"), tmp_path / "there", tmp_path / "back")
    assert_same_content(newest(tmp_path / "back"), newest(tmp_path / "checkpoints"))


@pytest.fixture(scope="module")
def low_precision_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint at iteration 10 of a run in bfloat16, whose main parameters are float32."""
    folder = tmp_path_factory.mktemp("bf16")
    train(folder, HOME, "--bf16 --exit-interval 10")
    return folder / "checkpoints"


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_main_parameters_of_experts_are_the_same_at_any_layout(
    low_precision_home: Path, name: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    there = Layout(layout.num_processes, f"{layout.flags} --bf16")
    pass_through(there, low_precision_home, tmp_path)
    kept = read_index(newest(tmp_path)).tensors
    weight = "decoder.layers.2.mlp.experts.linear_fc1.weight"
    assert kept[f"model.{weight}"].dtype == "bfloat16"
    assert kept[f"optimizer.main_param.{weight}"].dtype == "float32"
    assert "model.decoder.layers.2.mlp.router.expert_bias" in kept
    assert_same_content(newest(tmp_path), newest(low_precision_home))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) for name in ("ep1", "ep2-tp2", "dp4-fully-sharded")]
)
def test_training_of_experts_goes_on_at_another_layout(home: tuple[Path, ForkedRun], name: str, tmp_path: Path) -> None:
    copy_of_iteration_10(home[0], tmp_path)
    run = train(tmp_path, LAYOUTS[name])
    assert_goes_on_like(run, home[1])
    lines = run.iterations()
    assert all(set(line["expert_load"]) == {"2", "3", "4"} for line in lines)
    for line in lines:
        assert all(sum(shares) == pytest.approx(8.0) for shares in line["expert_load"].values())
        assert line["load_balancing_loss"] > 0
        assert line["z_loss"] > 0
        assert line["dropped_tokens"] == 0.0
    assert "load_balancing_loss: " in run.stdout
    assert "expert_load_max: " in run.stdout


MUON = f"{EXPERTS} --optimizer muon --muon-nesterov --muon-fp32-matmul-prec highest --ema-decay 0.9"


@pytest.mark.long
def test_muon_of_experts_goes_on_at_other_layouts(tmp_path: Path) -> None:
    spread = Layout(4, f"{MUON} --expert-model-parallel-size 2 --use-distributed-optimizer")
    whole = train(tmp_path / "whole", spread, "--save-interval 10")
    for name, layout in (
        ("ep1", Layout(1, MUON)),
        (
            "tp2-ep2",
            Layout(
                2,
                f"{MUON} --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
                "--sequence-parallel",
            ),
        ),
    ):
        copy_of_iteration_10(tmp_path / "whole" / "checkpoints", tmp_path / name)
        checkpoints = tmp_path / name / "checkpoints"
        pass_through(layout, checkpoints, tmp_path / f"{name}-there")
        assert_same_content(newest(tmp_path / f"{name}-there"), newest(checkpoints))
        assert_goes_on_like(train(tmp_path / name, layout), whole)
    index = read_index(newest(tmp_path / "whole" / "checkpoints"))
    momenta = {name for name in index.tensors if "momentum_buffer" in name and ".experts." in name}
    assert len(momenta) == 2 * 3
    assert not any("exp_avg" in name and ".experts." in name for name in index.tensors)
