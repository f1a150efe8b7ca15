"""What a test does to a training run from inside: given weights, a NaN, a signal, an exception, a sudden death.

Also a script with the command line of ``pretrain_gpt.py``, for torchrun; the faults are then in the environment
variable ``TEST_FAULTS`` as JSON.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import pretrain_gpt
from megatron.checkpoint import save
from megatron.config.run_config import RunConfig
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.datasets.gpt_dataset import ExternalSamples, GPTSample, SampleDataset
from megatron.core.errors import DataError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import spec_of
from megatron.training import checkpointing, dist_signal_handler
from megatron.training.data_plan import DatasetSplitsBuilder
from megatron.training.exit_reason import launch_environment_or_exit, parse_arguments_or_exit, run_program
from megatron.training.initialize import Runtime
from megatron.training.preflight import prepare_data_or_exit
from megatron.training.pretraining import pretrain_from_config

VARIABLE = "TEST_FAULTS"
POLL_INTERVAL_S = 0.002
FULL_DISK_BYTES = 60_000  # enough for what the tests log, too little for a shard


@dataclass(frozen=True)
class Faults:
    """Name what goes wrong and where; micro-batches are those of training on one rank, counted from 1.

    ``weights`` is an npz file of global tensors that the model begins with. On ``rank`` happen ``nan_loss_at``,
    ``nan_gradient_at`` (a micro-batch in which ``nan_parameter``'s gradient is spoiled), ``drift_at`` (one before which
    an element of ``drifting_parameter`` changes), ``raise_at``,
    ``data_error_at``, ``sigterm_at`` and ``hour_passes_at`` (for the time limit); ``deaf_at`` keeps the other ranks
    from answering anything for a minute, as a collective on a GPU does whose peer is gone. ``kill_after_s`` (from the
    first micro-batch on; only ``kill_rank`` where it is given) and ``kill_at_checkpoint`` (an iteration in the tracker
    file ``tracker``) kill every rank without a warning.
    ``no_room`` gives two micro-batches: from the one to before the other no file of ``rank`` can become large.
    ``drop_share`` masks out a share of the tokens that differs from sample to sample. The disk fails where
    ``unreadable_sample`` of the training data lies, and on ``rank`` reading ``endless_sample`` never ends. The loss of
    ``poisoned`` samples is ``poison`` times as large, whenever and wherever it is computed. ``bad_weight_at`` is a
    micro-batch before which the first element of ``drifting_parameter`` becomes ``bad_weight``. ``sleep_at`` begins an
    endless sleep where ``sleep_in`` says: "forward", with Python's "lock" held, or in the next "save".
    ``slow_save_s`` is how long every save sleeps, and ``slow_s`` every forward pass from ``slow_from`` on.
    """

    weights: str | None = None
    rank: int = 0
    nan_loss_at: tuple[int, ...] = ()
    nan_gradient_at: int | None = None
    nan_parameter: str = "decoder.final_layernorm.weight"
    drift_at: int | None = None
    drifting_parameter: str = "decoder.final_layernorm.weight"
    raise_at: int | None = None
    deaf_at: int | None = None
    data_error_at: int | None = None
    sigterm_at: int | None = None
    hour_passes_at: int | None = None
    kill_after_s: float | None = None
    kill_rank: int | None = None
    kill_at_checkpoint: int | None = None
    tracker: str = ""
    no_room: tuple[int, int] | None = None
    drop_share: float = 0.0
    unreadable_sample: int | None = None
    poisoned: tuple[int, ...] = ()
    poison: float = float("nan")
    bad_weight_at: int | None = None
    bad_weight: float = float("nan")
    sleep_at: int | None = None
    sleep_in: str = "forward"
    endless_sample: int | None = None
    slow_save_s: float = 0.0
    slow_from: int | None = None
    slow_s: float = 0.0

    def environment(self) -> dict[str, str]:
        """Return what hands these faults to the script."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


def run_with_faults(argv: Sequence[str], faults: Faults) -> int:
    """Do what ``pretrain_gpt.py`` does, with faults; return the exit status."""
    launch = launch_environment_or_exit()
    _prepare_death(faults)
    forward_step = _FaultyForwardStep(faults, launch.rank)
    config = parse_arguments_or_exit(argv, launch.world_size, launch.rank)
    tokenizer = prepare_data_or_exit(config, launch, pretrain_gpt.provide_datasets)

    def provide_model(config: RunConfig, runtime: Runtime, contents: StageContents) -> GPTModel:
        model = pretrain_gpt.provide_model(config, runtime, contents)
        if faults.weights is not None:
            _fill(model, faults.weights)
        return model

    def provide_datasets(*args: Any) -> DatasetSplitsBuilder:
        builder = pretrain_gpt.provide_datasets(*args)
        if faults.poisoned:
            return _WatchedData(builder, faults.poisoned, forward_step.poisoned_labels)
        if faults.endless_sample is not None and launch.rank == faults.rank:
            return _FaultyData(builder, lambda dataset: _EndlessDisk(dataset, faults.endless_sample))
        if faults.unreadable_sample is not None:
            return _FaultyData(builder, lambda dataset: _FailingDisk(dataset, faults.unreadable_sample))
        return builder

    if faults.slow_save_s and launch.rank == faults.rank:
        _delay_saves(faults.slow_save_s)
    return pretrain_from_config(config, launch, tokenizer, provide_model, provide_datasets, forward_step)


class _FaultyData:
    """Build data sets of which one training sample cannot be read."""

    def __init__(self, builder: DatasetSplitsBuilder, spoil: Callable[[SampleDataset], SampleDataset]) -> None:
        self.check = builder.check
        self._build = builder.build
        self._spoil = spoil

    def build(self) -> DatasetSplits:
        splits = self._build()
        assert splits.train is not None
        return dataclasses.replace(splits, train=self._spoil(splits.train))


class _WatchedData:
    """Build data sets, and note the labels of some training samples."""

    def __init__(self, builder: DatasetSplitsBuilder, samples: tuple[int, ...], labels: list[torch.Tensor]) -> None:
        self.check = builder.check
        self._build = builder.build
        self._samples = samples
        self._labels = labels

    def build(self) -> DatasetSplits:
        splits = self._build()
        assert splits.train is not None
        assert not isinstance(splits.train, ExternalSamples)
        self._labels += [torch.from_numpy(splits.train[sample]["labels"]) for sample in self._samples]
        return splits


class _FailingDisk:
    """Give the samples of a data set but for one."""

    def __init__(self, dataset: SampleDataset, unreadable_sample: int | None) -> None:
        self._dataset = dataset
        self._unreadable_sample = unreadable_sample
        self.source_of = dataset.source_of

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> GPTSample:
        if index == self._unreadable_sample:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._dataset[index]


class _EndlessDisk(_FailingDisk):
    """Give the samples of a data set but for one, for which one waits for ever."""

    def __getitem__(self, index: int) -> GPTSample:
        if index == self._unreadable_sample:
            sleep_for_ever()
        return self._dataset[index]


def sleep_for_ever() -> None:
    """Sleep."""
    while True:
        time.sleep(3600.0)


class _FaultyForwardStep:
    """Run the forward step of ``pretrain_gpt.py`` and let happen what is due."""

    def __init__(self, faults: Faults, rank: int) -> None:
        self.faults = faults
        self.rank = rank
        self.is_here = rank == faults.rank
        self.microbatch = 0
        self.poisoned_labels: list[torch.Tensor] = []

    def __call__(self, batch: Batch, model: GPTModel, hidden: torch.Tensor | None) -> ChunkResult:
        result = self._compute(batch, model, hidden)
        if batch.labels is None or not isinstance(result, MicrobatchLoss):
            return result
        if any(bool((batch.labels.cpu() == labels).all(dim=1).any()) for labels in self.poisoned_labels):
            return dataclasses.replace(result, loss_sum=result.loss_sum * self.faults.poison)
        return result

    def _compute(self, batch: Batch, model: GPTModel, hidden: torch.Tensor | None) -> ChunkResult:
        faults = self.faults
        if faults.drop_share:
            mask = _uneven_mask(batch, faults.drop_share)
            batch = dataclasses.replace(batch, loss_mask=mask, num_tokens=mask.sum())
        if not model.training:
            return pretrain_gpt.forward_step(batch, model, hidden)
        self.microbatch += 1
        if self.microbatch == 1 and faults.kill_after_s is not None and faults.kill_rank in (None, self.rank):
            threading.Thread(target=_die_after, args=(faults.kill_after_s,), daemon=True).start()
        if self.microbatch == faults.deaf_at and not self.is_here:
            _be_deaf()
        if not self.is_here:
            return pretrain_gpt.forward_step(batch, model, hidden)
        if faults.slow_from is not None and self.microbatch >= faults.slow_from:
            time.sleep(faults.slow_s)
        if self.microbatch == faults.sleep_at:
            if faults.sleep_in == "forward":
                sleep_for_ever()
            if faults.sleep_in == "lock":
                _hold_the_lock()
            _delay_saves(None)
        if self.microbatch == faults.raise_at:
            raise ValueError(f"a fault of micro-batch {self.microbatch} on rank {faults.rank}")
        if self.microbatch == faults.data_error_at:
            raise DataError(f"a file is gone in micro-batch {self.microbatch}; put it back")
        if self.microbatch == faults.sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.microbatch == faults.hour_passes_at:
            dist_signal_handler.time = SimpleNamespace(time=lambda: time.time() + 3600.0)
        if faults.no_room is not None and self.microbatch in faults.no_room:
            limit = FULL_DISK_BYTES if self.microbatch == faults.no_room[0] else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        if self.microbatch == faults.bad_weight_at:
            with torch.no_grad():
                _parameter_named(model, faults.drifting_parameter).view(-1)[0] = faults.bad_weight
        if self.microbatch == faults.drift_at:
            with torch.no_grad():
                _parameter_named(model, faults.drifting_parameter)[0] += 0.5
        handle = None
        if self.microbatch == faults.nan_gradient_at:
            handle = _spoil_gradient(model, faults.nan_parameter)
        loss = pretrain_gpt.forward_step(batch, model, hidden)
        if handle is not None:
            # The hook is of this backward pass only, which is over when the next micro-batch comes.
            self._handle = handle
        if self.microbatch in faults.nan_loss_at and isinstance(loss, MicrobatchLoss):
            loss = dataclasses.replace(loss, loss_sum=loss.loss_sum * float("nan"))
        return loss


def _delay_saves(seconds: float | None) -> None:
    """Let every save sleep before it writes, for ever where it is None."""
    write = save.save_in_steps

    def sleep_first(*args: Any) -> Iterator[Any]:
        sleep_for_ever() if seconds is None else time.sleep(seconds)
        return write(*args)

    checkpointing.save_in_steps = sleep_first


def _hold_the_lock() -> None:
    """Stay for ever in a call into C that keeps Python's lock, and that no signal ends."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _be_deaf() -> None:
    """Stay for a minute in one call into C++ that no signal handler of Python can interrupt."""
    library = ctypes.CDLL(None)
    mutex, event = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    deadline = (ctypes.c_long * 2)(int(time.time()) + 60, 0)
    library.pthread_mutex_lock(mutex)
    library.pthread_cond_timedwait(event, mutex, deadline)


def _spoil_gradient(model: GPTModel, name: str) -> object:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, float("nan"))

    return _parameter_named(model, name).register_hook(spoil)


def _parameter_named(model: GPTModel, name: str) -> torch.nn.Parameter:
    (parameter,) = (p for p in model.parameters() if spec_of(p).name == name)
    return parameter


def _uneven_mask(batch: Batch, share: float) -> torch.Tensor:
    """Drop tokens by their content, so that every layout drops the same ones; few in some samples, many in others."""
    assert batch.tokens is not None, "without a pipeline every rank has the tokens"
    first = batch.tokens[:, :1]
    return ((batch.tokens * 7 + first) % 97 >= 97 * share * (first % 5) / 4).to(torch.float32)


def _fill(model: GPTModel, path: str) -> None:
    whole = np.load(path)
    names = {spec_of(parameter).name for parameter in model.parameters()}
    # A pipeline stage holds a part of them.
    assert names <= set(whole.files), sorted(names - set(whole.files))
    with torch.no_grad():
        for parameter in model.parameters():
            spec = spec_of(parameter)
            tensor = torch.from_numpy(whole[spec.name])
            for shard in spec.shards:
                parameter[shard.local_box.slices] = tensor[shard.global_box.slices].to(parameter.dtype)


def _prepare_death(faults: Faults) -> None:
    if faults.kill_at_checkpoint is not None:
        threading.Thread(
            target=_die_at, args=(Path(faults.tracker), str(faults.kill_at_checkpoint)), daemon=True
        ).start()


def _die_after(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(tracker: Path, text: str) -> None:
    while not tracker.exists() or tracker.read_text() != text:
        time.sleep(POLL_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    values = json.loads(os.environ.get(VARIABLE, "{}"))
    values["nan_loss_at"] = tuple(values.get("nan_loss_at", ()))
    run_program(lambda: run_with_faults(sys.argv[1:], Faults(**values)))
