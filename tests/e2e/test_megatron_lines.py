"""A whole log parses with expressions written for Megatron's lines, in Megatron's order; so do the files beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.megatron_lines import DATE, DURING, assert_in_order, parse
from tests.e2e.test_validation_sets import extra_sets
from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import ForkedRun, fork_training

LLAMA = """
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16
"""
SHORT = "--lr-decay-iters 20 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 2"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForkedRun, ForkedRun, Path]:
    """Train as GPT-2's scripts do, then go on."""
    folder = tmp_path_factory.mktemp("gpt")
    flags = f"{SHORT} --fp16 --initial-loss-scale 4096 --log-megatron-lines --log-progress --log-params-norm "
    flags += "--log-num-zeros-in-grad --ckpt-format torch"
    runs = [fork_training(toy_args(folder, flags, f"--train-iters {n}")).check() for n in (4, 6)]
    return runs[0], runs[1], folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForkedRun, Path]:
    """Train as the script with named validation sets does, in a pipeline."""
    folder = tmp_path_factory.mktemp("llama")
    flags = f"{LLAMA} {SHORT} --train-iters 3 --pipeline-model-parallel-size 2 --timing-log-level 2 --log-throughput"
    flags += " --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-batch-size-to-tensorboard"
    flags += " --log-world-size-to-tensorboard --log-memory-to-tensorboard --log-layer-norms 2 --log-params-norm"
    flags += " --log-max-attention-logit"
    flags += f" --log-num-zeros-in-grad --tensorboard-dir {folder / 'board'}"
    return fork_training(toy_args(folder, flags, extra_sets(folder / "extra")), nproc=2).check(), folder


ONE_PROCESS = {"other shards"}
OF_RESUME = {"loading", "version", "kept value", "new value", "loaded"}
OF_START = {"no checkpoint", "random"}
OF_BUILDING = {"index is built", "index time", "using", "used", "shuffle"}
LONG = {
    *("index builder", "index builder done", "fused kernels", "fused kernels done", "bucket's parameter"),
    *("building GPT data", "prefix", "index", "reading", "epochs", "last epoch", "mapping"),
    *(*OF_BUILDING, "index is loaded"),
}


def test_a_first_log_of_the_gpt_form_parses(gpt: tuple[ForkedRun, ForkedRun, Path]) -> None:
    names = parse(gpt[0].stdout)
    assert_in_order(names, OF_RESUME | {"last epoch"})
    assert set(DURING) - set(names) == {"other shards", "step time"}
    assert names.count("iteration") == 4
    assert names.count("bucket's parameter") == 28
    assert names.count("range") == 3
    assert names.count("evaluated") == 2  # the last evaluation alone, as in Megatron


def test_a_log_that_goes_on_parses(gpt: tuple[ForkedRun, ForkedRun, Path]) -> None:
    log = gpt[1].stdout
    assert_in_order(parse(log), OF_START | OF_BUILDING | {"last epoch"})
    assert re.search(rf"^ loading checkpoint from {re.escape(str(gpt[2]))}/checkpoints at iteration 4$", log, re.M)
    assert [line for line in log.splitlines() if line.startswith((" > using checkpoint", " > overriding"))] == [
        " > using checkpoint value 0.003 for learning rate",
        " > using checkpoint value 0.0003 for minimum learning rate",
        " > using checkpoint value 4 for warmup iterations",
        " > using checkpoint value 80 for total number of iterations",
        " > using checkpoint value cosine for learning rate decay style",
        " > using checkpoint value 0.01 for start weight decay",
        " > using checkpoint value 0.01 for end weight decay",
        " > overriding total number of weight decay iterations value to 24",
        " > using checkpoint value constant for weight decay incr style",
    ]


def test_the_folder_has_the_tree_and_the_files_that_scripts_read(gpt: tuple[ForkedRun, ForkedRun, Path]) -> None:
    folder = gpt[2] / "checkpoints"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert (folder / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    assert (folder / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    lines = (folder / "progress.txt").read_text().splitlines()
    start = rf"{DATE}\tJob ID: \w*\t# GPUs: 1\tStarting job"
    saved = (
        rf"{DATE}\tJob ID: \w*\t# GPUs: 1\tSaved checkpoint\tIteration: %d\tJob throughput: \d+\.\d TFLOP/s/GPU\t"
        r"Cumulative throughput: \d+\.\d TFLOP/s/GPU\tFloating-point operations: \d\.\d\de\+\d\d\t"
        r"Tokens \(in billions\): \d+\.\d\d"
    )
    forms = [start, saved % 4, start, saved % 6]
    assert len(lines) == len(forms)
    assert all(re.fullmatch(form, line) for form, line in zip(forms, lines))


def test_a_log_of_the_llama_form_parses(llama: tuple[ForkedRun, Path]) -> None:
    names = parse(llama[0].stdout)
    assert_in_order(names, OF_RESUME | LONG)
    assert set(DURING) - set(names) == set()
    blocks = llama[0].stdout.split("(min, max) time across ranks (ms):\n")
    timers = re.findall(r"^    ([\w-]+) \.+:", next(block for block in blocks if "forward-backward" in block), re.M)
    assert sorted(timers) == [
        *("all-grads-sync", "backward-compute", "backward-recv", "backward-send", "batch-generator"),
        *(
            "embedding-grads-all-reduce",
            "forward-backward",
            "forward-compute",
            "forward-recv",
            "forward-send",
            "optimizer",
        ),
        *("optimizer-clip-main-grad", "optimizer-copy-main-to-model-params", "optimizer-copy-to-main-grad"),
        *("optimizer-count-zeros", "optimizer-inner-step", "optimizer-unscale-and-check-inf"),
    ]


def test_every_figure_is_on_the_board_over_iterations_and_over_samples(llama: tuple[ForkedRun, Path]) -> None:
    run, folder = llama
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    losses = [f"lm loss {name}{ppl}" for name in ("validation", "web", "books", "test") for ppl in ("", " ppl")]
    figures = ["lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm"]
    both = {*figures, *losses, "world-size"}
    assert both <= tags
    assert {f"{tag} vs samples" for tag in both} == {tag for tag in tags if tag.endswith(" vs samples")}
    for tag in both:
        over_samples = [(4 * event.step, event.value) for event in board.Scalars(tag)]
        assert [(event.step, event.value) for event in board.Scalars(f"{tag} vs samples")] == over_samples
    assert {"iteration-time", "throughput", "forward-backward-time", "backward-recv-time", "optimizer-time"} <= tags
    assert "max_attention_logit" in tags
    assert {"samples vs steps", "mem-allocated-bytes", "mem-reserved-bytes", "mem-max-allocated-bytes"} <= tags
    for name in ("web", "books"):
        shown = [event.value for event in board.Scalars(f"lm loss {name}")]
        assert shown == pytest.approx([line["lm_loss"] for line in run.evaluations(name)], rel=1e-6)
        assert len(shown) == 2


def layer_norms(log: str) -> dict[str, tuple[float, float]]:
    found = re.findall(r"^ iteration +\d+ \| +([\w ]+?) \| params norm: (\S+) \| grad norm: (\S+) \|$", log, re.M)
    return {name: (float(params), float(grads)) for name, params, grads in found}


def largest_logit(log: str) -> float:
    (found,) = re.findall(r" max attention logit: (\S+) \|", log)
    return float(found)


def test_norms_of_layers_add_up_to_the_whole_models(llama: tuple[ForkedRun, Path]) -> None:
    run, folder = llama
    norms = layer_norms(run.stdout)
    assert list(norms) == ["embedding", "layer 0", "layer 1", "output"]
    second = run.iterations()[1]
    assert sum(grads**2 for _, grads in norms.values()) ** 0.5 == pytest.approx(second["grad_norm"], rel=1e-5)
    # The whole norm is that of the float32 parameters after the update.
    assert sum(params**2 for params, _ in norms.values()) ** 0.5 == pytest.approx(second["params_norm"], rel=1e-2)
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    for name, (params, grads) in norms.items():
        tag = name.replace(" ", "-")
        (event,) = board.Scalars(f"grad-norm/{tag}")
        assert (event.step, event.value) == (2, pytest.approx(grads, rel=1e-6))
        assert board.Scalars(f"params-norm/{tag}")[0].value == pytest.approx(params, rel=1e-6)


def test_norms_and_logits_are_those_of_one_process_at_every_layout(tmp_path: Path) -> None:
    flags = "--train-iters 1 --lr-warmup-iters 0 --log-layer-norms 1 --eval-iters 0 --hidden-dropout 0 "
    flags += "--attention-dropout 0 --log-max-attention-logit --timing-log-level 1"
    log = fork_training(toy_args(tmp_path, flags, save=False)).check().stdout
    alone, logit = layer_norms(log), largest_logit(log)
    assert len(alone) == 4
    for layout in (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads --micro-batch-size 1",
    ):
        run = fork_training(toy_args(tmp_path, flags, layout, save=False), nproc=4).check()
        assert set(parse(run.stdout)) >= {"iteration", "step time"}
        assert re.search(r"^    layernorm-grads-all-reduce \.+: ", run.stdout, re.M) is not None or "optim" in layout
        assert (re.search(r"^    params-all-gather \.+: ", run.stdout, re.M) is not None) == ("optim" in layout)
        assert largest_logit(run.stdout) == pytest.approx(logit, abs=2e-3)
        assert layer_norms(run.stdout).keys() == alone.keys()
        for name, (params, grads) in layer_norms(run.stdout).items():
            assert params == pytest.approx(alone[name][0], rel=2e-6), f"{layout} {name}"
            assert grads == pytest.approx(alone[name][1], rel=2e-5), f"{layout} {name}"
