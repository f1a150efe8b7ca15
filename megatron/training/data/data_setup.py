"""Build the data sets of a run, and choose the order of their samples."""

from __future__ import annotations

from megatron.core.collectives import raise_on_all_ranks
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.datasets.data_samplers import DataloaderType, SampleOrder
from megatron.core.datasets.gpt_dataset import SampleDataset
from megatron.core.errors import DataError, MegatronError
from megatron.training.config.run_config import RunConfig
from megatron.training.data.data_plan import DatasetSplitsBuilder, SampleTargets
from megatron.training.process.console import print_line
from megatron.training.process.initialize import Runtime


def build_datasets(builder: DatasetSplitsBuilder, targets: SampleTargets, runtime: Runtime) -> DatasetSplits:
    """Build the data sets: rank 0 first, then one process of each machine, so that the others find its index cache.

    Machines need not share a file system: each may hold a copy of the data and keep a cache of its own.

    Raises:
        DataError: on every rank alike, where one of them cannot build them.
    """
    if runtime.is_reporter:
        print_line(" > datasets target sizes (minimum size):")
        print_line(f"    train:      {targets.train}")
        print_line(f"    validation: {'all' if targets.valid is None else targets.valid}")
        print_line(f"    test:       {targets.test}")
        for extra in targets.extra_valid:
            print_line(f"    {extra.name + ':':11} {'all' if extra.num_samples is None else extra.num_samples}")
    datasets: DatasetSplits | None = None
    for is_due in (runtime.is_reporter, runtime.is_first_on_machine, True):
        error: MegatronError | None = None
        if is_due and datasets is None:
            try:
                datasets = builder.build()
            except MegatronError as failure:
                error = failure if runtime.is_reporter else DataError(f"rank {runtime.state.rank}: {failure}")
        raise_on_all_ranks(error, runtime.state.world)
    assert datasets is not None, "every rank is due in the end"
    return datasets


def sample_order(dataset: SampleDataset, config: RunConfig) -> SampleOrder:
    """Return the order in which a run reads the samples of a data set."""
    dataloader_type: DataloaderType = "cyclic" if config.data.dataloader_type == "cyclic" else "single"
    return SampleOrder(dataloader_type, len(dataset), config.initialization.seed)
