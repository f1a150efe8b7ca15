"""A whole log parses with expressions written for Megatron's lines, in Megatron's order; so do the files beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.test_validation_sets import extra_sets
from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import ForkedRun, fork_training

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
EXPONENT = r"-?\d\.\d{6}E[+-]\d\d"
TIMER = r"    {} \.+: \(\d+\.\d\d, \d+\.\d\d\)"
BILLIONS = r"\d+\.\d\d"

# From the world to the first iteration, in the order of Megatron's log.
BEFORE = {
    "world": r"using world size: \d+, data-parallel size: \d+, context-parallel size: \d+, "
    r"tensor-model-parallel size: \d+, pipeline-model-parallel size: \d+",
    "precision": r"using torch\.(float16|bfloat16|float32) for parameters \.\.\.",
    "arguments": "------------------------ arguments ------------------------",
    "argument": r"  \w+ \.* .*",
    "end of arguments": "-------------------- end of arguments ---------------------",
    "micro-batches": r"setting number of micro-batches to constant \d+",
    "tokenizer": r"> building \w+ tokenizer \.\.\.",
    "vocabulary": r" > padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: \d+\)",
    "distributed": r"> initializing torch distributed \.\.\.",
    "tensor parallel": r"> initialized tensor model parallel with size \d+",
    "pipeline parallel": r"> initialized pipeline model parallel with size \d+",
    "seeds": r"> setting random seeds to \d+ \.\.\.",
    "index builder": r"> compiling dataset index builder \.\.\.",
    "index builder done": r">>> done with dataset index builder\. Compilation time: \d+\.\d{3} seconds",
    "fused kernels": r"> compiling and loading fused kernels \.\.\.",
    "fused kernels done": r">>> done with compiling and loading fused kernels\. Compilation time: \d+\.\d{3} seconds",
    "time to initialize": r"time to initialize megatron \(seconds\): \d+\.\d{3}",
    "initialized": rf"\[after megatron is initialized\] datetime: {DATE}",
    "model": r"building GPT model \.\.\.",
    "parameters": r" > number of parameters on \(tensor, pipeline\) model parallel rank \(\d+, \d+\): \d+",
    "buckets": r"Number of buckets for gradient all-reduce / reduce-scatter: \d+",
    "bucket": r"Params for bucket \d+ \(\d+ elements, \d+ padded size\):",
    "bucket's parameter": r"\tmodule\.[\w.]+",
    "decay style": r"> learning rate decay style: (constant|linear|cosine|inverse-square-root|WSD)",
    "no checkpoint": r"WARNING: could not find the metadata file \S+/latest_checkpointed_iteration\.txt",
    "random": "    will not load any checkpoints and will start from random",
    "loading": r" loading checkpoint from \S+ at iteration \d+",
    "version": r" checkpoint version \d\.\d",
    "kept value": r" > using checkpoint value \S+ for (learning rate|minimum learning rate|warmup iterations|"
    r"total number of iterations|learning rate decay style|start weight decay|end weight decay|"
    r"total number of weight decay iterations|weight decay incr style)",
    "new value": r" > overriding [a-z ]+ value to \S+",
    "loaded": r"  successfully loaded checkpoint from \S+ at iteration \d+",
    "load time": TIMER.format("load-checkpoint"),
    "model is built": rf"\[after model, optimizer, and learning rate scheduler are built\] datetime: {DATE}",
    "building data": r"> building train, validation, and test datasets \.\.\.",
    "targets": r" > datasets target sizes \(minimum size\):",
    "target": r"    (train|validation|test|web|books): +\d+",
    "building GPT data": r"> building train, validation, and test datasets for GPT \.\.\.",
    "prefix": r"data_prefix: \['.+'\]",
    "index": r" > building dataset index \.\.\.",
    "reading": r"    reading (sizes|pointers|document index)\.\.\.",
    "documents": r"    number of documents: \d+",
    "split": " > dataset split:",
    "split's name": "    (train|validation|test):",
    "range": r"     document indices in \[\d+, \d+\) total of \d+ documents",
    "epochs": r" > only one epoch required, setting separate_last_epoch to False",
    "last epoch": r" > last epoch number of samples \(-?\d+\) is (smaller|larger) than 80% of number of samples "
    r"per epoch \(\d+\), setting separate_last_epoch to (True|False)",
    "mapping": r" > loading (doc|sample|shuffle)-idx mapping from \S+\.npy",
    "samples": r"    total number of samples: \d+",
    "number of epochs": r"    total number of epochs: \d+",
    "data are built": r"> finished creating GPT datasets \.\.\.",
    "loaders are built": rf"\[after dataloaders are built\] datetime: {DATE}",
    "done": r"done with setup \.\.\.",
    "model time": TIMER.format("model-and-optimizer-setup"),
    "data time": TIMER.format("train/valid/test-data-iterators-setup"),
    "training": r"training \.\.\.",
    "start": rf"\[before the start of training step\] datetime: {DATE}",
}
DURING = {
    "iteration": rf" \[{DATE}\] iteration +\d+/ +\d+ \| consumed samples: +\d+ \| elapsed time per iteration \(ms\): "
    rf"\d+\.\d \|( throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \|)? learning rate: {EXPONENT} \| global batch size: +"
    rf"\d+ \|( lm loss: {EXPONENT} \|)? loss scale: \d+\.\d \|( grad norm: \d+\.\d{{3}} \|)?( num zeros: \d+ \|)?"
    r"( params norm: \d+\.\d{3} \|)?( max attention logit: -?\d+\.\d{3} \|)? number of skipped iterations: +\d+ \|"
    r" number of nan iterations: +\d+ \|",
    "block": rf"Number of parameters in transformer block in billions:  {BILLIONS}",
    "embedding": rf"Number of parameters in embedding layers in billions: {BILLIONS}",
    "total": rf"Total number of parameters in billions: {BILLIONS}",
    "shard": r"Number of parameters in most loaded shard in billions: \d+\.\d{4}",
    "other shards": r"Number of parameters in other shards in billions: \d+\.\d{4}",
    "footprints": r"Theoretical memory footprints: weight and optimizer=\d+\.\d\d MB"
    r"(, activation=\d+\.\d\d MB, total=\d+\.\d\d MB)?",
    "memory": r"\[Rank \d+\] \(after \d+ iterations\) memory \(MB\) \| allocated: \d+\.\d\d \| max allocated: "
    r"\d+\.\d\d \| reserved: \d+\.\d \| max reserved: \d+\.\d",
    "times": r"\(min, max\) time across ranks \(ms\):",
    "step time": TIMER.format(
        "(forward-backward|forward-compute|backward-compute|batch-generator|forward-recv|forward-send|backward-recv|"
        "backward-send|layernorm-grads-all-reduce|embedding-grads-all-reduce|all-grads-sync|params-all-gather|"
        "optimizer-copy-to-main-grad|optimizer-unscale-and-check-inf|optimizer-clip-main-grad|optimizer-count-zeros|"
        "optimizer-inner-step|optimizer-copy-main-to-model-params|optimizer)"
    ),
    "evaluation time": TIMER.format("evaluate"),
    "rule": "-+",
    "validation": rf" validation loss at iteration \d+ on [\w ]+ set( \w+)? \| lm loss value: {EXPONENT} \| lm loss PPL"
    rf": {EXPONENT} \|",
    "saving": r"saving checkpoint at iteration +\d+ to \S+",
    "saved": r"  successfully saved checkpoint at iteration +\d+ to \S+",
    "save time": TIMER.format("save-checkpoint"),
    "after": rf"\[after training is done\] datetime: {DATE}",
    "evaluated samples": r"Evaluating on \d+ samples",
    "evaluated": r"Evaluating iter \d+/\d+",
}
# What this project says beside.
OWN = {
    "kernels": "attention kernels?: .+",
    "changes": "configuration changed since the checkpoint: .+",
    "layer norms": rf" iteration +\d+ \| +(embedding|layer \d+|output) \| params norm: {EXPONENT} \| grad norm: "
    rf"{EXPONENT} \|",
}
FORMS = {name: re.compile(form) for name, form in {**BEFORE, **DURING, **OWN}.items()}

LLAMA = """
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16
"""
SHORT = "--lr-decay-iters 20 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 2"


def parse(log: str) -> list[str]:
    """Return the name of each line's form; fail with the lines that have none."""
    names, unknown = [], []
    for line in log.splitlines():
        name = next((name for name, form in FORMS.items() if form.fullmatch(line)), None)
        if name is None:
            unknown.append(line)
        else:
            names.append(name)
    assert unknown == []
    return names


def assert_in_order(names: list[str], missing: set[str]) -> None:
    """Assert that the forms before the first iteration come first in Megatron's order, all but the missing ones."""
    expected = [name for name in BEFORE if name not in missing]
    first = dict.fromkeys(name for name in names if name in BEFORE)
    assert list(first) == expected


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
LONG = {
    *("index builder", "index builder done", "fused kernels", "fused kernels done", "bucket's parameter"),
    *("building GPT data", "prefix", "index", "reading", "epochs", "last epoch", "mapping"),
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
    assert_in_order(parse(log), OF_START | {"last epoch"})
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
    flags += "--attention-dropout 0 --log-max-attention-logit"
    log = fork_training(toy_args(tmp_path, flags, save=False)).check().stdout
    alone, logit = layer_norms(log), largest_logit(log)
    assert len(alone) == 4
    for layout in (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads --micro-batch-size 1",
    ):
        run = fork_training(toy_args(tmp_path, flags, layout, save=False), nproc=4).check()
        assert largest_logit(run.stdout) == pytest.approx(logit, abs=2e-3)
        assert layer_norms(run.stdout).keys() == alone.keys()
        for name, (params, grads) in layer_norms(run.stdout).items():
            assert params == pytest.approx(alone[name][0], rel=2e-6), f"{layout} {name}"
            assert grads == pytest.approx(alone[name][1], rel=2e-5), f"{layout} {name}"
