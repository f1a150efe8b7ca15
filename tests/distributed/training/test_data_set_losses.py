"""The training loss of each data set of a blend: that of its samples one by one, at any layout."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.train_state import TrainState
from megatron.config.run_config import RunConfig
from megatron.core.datasets.blended_dataset import BlendedDataset, LaterPhase
from megatron.core.datasets.gpt_dataset import GPTSample, SampleDataset
from megatron.core.datasets.index_cache import IndexArrays
from megatron.core.datasets.sample_keys import blend_names
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.timers import Timers
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training.batch_source import BatchSource, batch_layout
from megatron.training.data_plan import dataset_config
from megatron.training.initialize import make_runtime
from megatron.training.loggers.log_lines import StepReport
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.training_step import TrainingStep
from megatron.verification.cells import BASE_FLAGS, DATA
from megatron.verification.run_cell import CPU, SyntheticDataset, resolve_cell
from tests.harness.distributed import run_distributed

NUM_STEPS, CONSUMED = 2, 7
PATHS = ("/corpus/web/text", "/corpus/books/text", "/corpus/code", "/corpus/never/read")
NAMES = ("web/text", "books/text", "code", "read")
# Micro-batches of any size then train alike.
KINDS = {name: (*flags, "--calculate-per-token-loss") for name, flags in DATA.items()}
LAYOUTS = {
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2"),
    "cp2-dp2": (4, "--context-parallel-size 2 --micro-batch-size 2"),
    "pp2-interleaved": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}
EVERYTHING = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2"


class Named(SyntheticDataset):
    """Give samples of their own under the name of a path."""

    def __init__(self, config: RunConfig, uneven: bool, number: int) -> None:
        made = dataset_config(config, build_tokenizer(**dataclasses.asdict(config.tokenizer)))
        super().__init__(dataclasses.replace(made, random_seed=1000 + number), uneven)
        self._path = PATHS[number]

    def source_of(self, index: int) -> str:
        return self._path


def blend(config: RunConfig, kind: str) -> LaterPhase:
    """Return a blend of which the run has read some samples before; the last data set has none."""
    numbers = np.random.RandomState(3).choice(3, 400, p=[0.6, 0.3, 0.1]).astype(np.int16)
    within = np.arange(400, dtype=np.int64)
    arrays = {"dataset_index": numbers, "dataset_sample_index": within}
    arrays["samples_taken"] = np.bincount(numbers, minlength=4)
    sets = [Named(config, kind == "uneven", number) for number in range(4)]
    return LaterPhase(BlendedDataset(sets, IndexArrays(arrays), "train"), CONSUMED)


def train(kind: str, flags: str, world_size: int) -> list[StepReport]:
    config = resolve_cell((*BASE_FLAGS, *KINDS[kind], *flags.split()), world_size, "float64")
    runtime = make_runtime(config, CPU)
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
    dataset, state, reports = blend(config, kind), TrainState(consumed_train_samples=CONSUMED), []
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    with contextlib.closing(
        BatchSource(dataset, config, runtime, vocab_size, CONSUMED, tells_data_sets=True)
    ) as source:
        step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers(), data_sets=source.data_sets)
        for _ in range(NUM_STEPS):
            reports.append(step.run(state, source, config.training.global_batch_size, None)[0])
    return reports


def losses_one_by_one(kind: str) -> Mapping[str, tuple[float, float]]:
    """Return the mean loss and the tokens of each data set in the first step, from samples that are asked alone."""
    config = resolve_cell((*BASE_FLAGS, *KINDS[kind]), 1, "float64")
    runtime = make_runtime(config, CPU)
    (model,) = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None).chunks
    dataset = blend(config, kind)
    sums: dict[str, list[tuple[float, float]]] = {}
    for index in range(CONSUMED, CONSUMED + config.training.global_batch_size):
        sample: GPTSample = dataset[index]
        tensors = {name: torch.from_numpy(np.asarray(value).copy())[None] for name, value in sample.items()}
        documents = tensors["document_ids"].long() if kind == "packed" else None
        with torch.no_grad():
            losses = model.eval()(
                tensors["tokens"].long(),
                tensors["position_ids"].long(),
                labels=tensors["labels"].long(),
                loss_mask=tensors["loss_mask"],
                pattern=AttentionPattern(document_ids=documents),
                hidden=None,
            )
        mask = tensors["loss_mask"].double()
        name = NAMES[PATHS.index(dataset.source_of(index))]
        sums.setdefault(name, []).append((float((losses.double() * mask).sum()), float(mask.sum())))
    totals = {name: np.array(each).sum(axis=0) for name, each in sums.items()}
    return {name: (loss / count, count) for name, (loss, count) in totals.items()}


def figures(report: StepReport) -> dict[str, tuple[float, float]]:
    return {name: (each.lm_loss, each.num_tokens) for name, each in report.data_sets.items()}


def check_parts(reports: Sequence[StepReport]) -> None:
    """Check that the parts, weighted by their tokens, are the training loss."""
    for report in reports:
        assert len(report.data_sets) > 1
        assert sum(each.num_tokens for each in report.data_sets.values()) == report.num_tokens
        whole = sum(each.lm_loss * each.num_tokens for each in report.data_sets.values()) / report.num_tokens
        assert whole == pytest.approx(report.lm_loss, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_data_set_is_that_of_its_samples_one_by_one(kind: str) -> None:
    reports = train(kind, "", 1)
    check_parts(reports)
    expected = losses_one_by_one(kind)
    assert figures(reports[0]).keys() == expected.keys()
    assert "read" not in expected
    for name, pair in figures(reports[0]).items():
        assert pair == pytest.approx(expected[name], rel=1e-10), name


def check_layout(kind: str, world_size: int, flags: str) -> None:
    alone = train(kind, "", 1)
    ranks = run_distributed(world_size, train, kind, flags, world_size, timeout_s=120)
    for reports in ranks:
        check_parts(reports)
        for report, expected in zip(reports, alone, strict=True):
            assert figures(report).keys() == figures(expected).keys()
            for name, pair in figures(report).items():
                assert pair == pytest.approx(figures(expected)[name], rel=1e-10), name


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp2-pp2", "cp2-dp2", pytest.param("pp2-interleaved", marks=pytest.mark.long)])
def test_it_is_the_same_at_any_layout(name: str) -> None:
    check_layout("uneven" if name == "tp2-pp2" else "packed", *LAYOUTS[name])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_with_all_parallelisms_at_once(kind: str) -> None:
    check_layout(kind, 16, EVERYTHING)


def test_names_are_the_shortest_ends_of_paths_that_differ() -> None:
    class Path:
        def __init__(self, path: str) -> None:
            self._path = path

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> GPTSample:
            raise AssertionError("names are found without a sample's text")

        def source_of(self, index: int) -> str:
            return self._path

    def names(*paths: str) -> tuple[str, ...]:
        sets: list[SampleDataset] = [Path(path) for path in paths]
        arrays = {"samples_taken": np.zeros(len(paths), np.int64)}
        return blend_names(BlendedDataset(sets, IndexArrays(arrays), "train"))

    assert names("/a/x", "/b/y") == ("x", "y")
    assert names("/a/x", "/b/x", "/b/y") == ("a/x", "b/x", "y")
    assert names("/a/x", "/a/x", "b/y", "/a/x") == ("x", "x (2)", "y", "x (3)")
    assert names("/a/x", "/a/x (2)", "/a/x") == ("x", "x (2)", "x (3)")
    assert names("x", "a/x", "/x") == ("x", "a/x", "/x")
    assert names("/a/x") == ()


def test_numbers_of_data_sets_are_laid_out_beside_the_labels_alone() -> None:
    config = resolve_cell((*BASE_FLAGS, "--pipeline-model-parallel-size", "2", "--micro-batch-size", "4"), 2, "float64")
    for stage, more in ((0, 0), (1, 2 * 4)):
        with_sets, without = (batch_layout(config, stage, 0, 100, tells) for tells in (True, False))
        assert with_sets.num_bytes == without.num_bytes + more
