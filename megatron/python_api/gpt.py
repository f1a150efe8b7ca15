"""A GPT model in the caller's process: built, trained, evaluated, saved and loaded as the command line does."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.checkpoint import ConversionRequest, Target, candidate_folders, convert, detect_format
from megatron.cli.text_data import with_tokenized_text
from megatron.config import RunConfig, recorded_config
from megatron.core.collectives import all_gather_last_dim, any_rank, run_on_all_ranks
from megatron.core.console import print_line
from megatron.core.datasets import BlendedDatasetBuilder, ExternalSamples, SampleDataset
from megatron.core.dist_checkpointing import read_index_file
from megatron.core.errors import CheckpointError, ConfigurationError, DataError, InputError
from megatron.core.inference import (
    BeamConfig,
    GenerationRequest,
    InferenceEngine,
    SamplingConfig,
    StopRule,
    check_request,
    new_tokens_that_fit,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.object_store import as_path
from megatron.core.ops import CAUSAL
from megatron.core.registry import is_registered
from megatron.core.tokenizers import Tokenizer
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.transformer import KeyValueCache
from megatron.python_api.history import Recorder, TrainingHistory
from megatron.python_api.model_state import ModelState, connect, ignore_line, read_launch
from megatron.python_api.settings import (
    Settings,
    kept_settings,
    loaded_settings,
    recorded_values,
    refuse_misplaced,
    refuse_other_model,
    settings_of,
    with_chosen_values,
    without_load,
)
from megatron.python_api.training_data import SOURCES, flags_of_data
from megatron.training import (
    BatchSource,
    DatasetsProvider,
    LaunchEnvironment,
    Program,
    SampleTargets,
    dataset_config,
    evaluate,
    forward_step,
    keep_arguments,
    provide_datasets,
    provide_model,
    sample_targets,
    train_held,
)
from megatron.training.callbacks import Callback, open_engine
from megatron.training.loggers import RunRecord

Tokens: TypeAlias = "str | Sequence[int] | Sequence[Sequence[int]] | NDArray[Any] | torch.Tensor"
"""A text, or token ids of the shape ``[s]`` or ``[b, s]``."""

_DEFAULT_NEW_TOKENS = 64
_KINDS = {bool: "True or False", int: "a whole number", float: "a number"}


class GPT:
    """A GPT model with its tokenizer, optimizer and progress, in this process or on all ranks of torchrun.

    `build` and `load` create it. Under torchrun every rank makes the same calls with the same arguments, and gets the
    same results.

    Attributes:
        config: all flags of the newest training, resolved.
        tokenizer: the tokenizer.
        history: the iterations of all trainings in this process.
    """

    config: RunConfig
    tokenizer: Tokenizer
    history: TrainingHistory

    def __init__(self, settings: Settings, launch: LaunchEnvironment, caller: str) -> None:
        """Build the model that the settings describe; `build` and `load` are the public ways."""
        config, notes = settings.resolve(caller, launch.world_size, has_data=False)
        if caller == "GPT.build":
            refuse_misplaced({**vars(config.checkpoint), **vars(config.restart)}, caller)
        # A load need not say which flags it read.
        shown = notes if not config.checkpoint.use_checkpoint_args else ()
        for note in shown if launch.rank == 0 else ():
            print_line(note)
        self.tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
        self.history = TrainingHistory()
        self._launch = launch
        self._settings = settings
        self._provider: DatasetsProvider = provide_datasets
        self._chosen: tuple[str, ...] = ()
        self._engine: InferenceEngine | None = None
        config, runtime = connect(config, launch, self.tokenizer)
        self._state = ModelState(config, runtime, self.tokenizer)
        self.config = config

    @classmethod
    def build(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | GPTConfig | RunConfig | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        **flags: Any,
    ) -> GPT:
        """Build a model with initial weights.

        Args:
            config: name of a preset, a .toml or .yaml file, a string of flags, a dict of flags, or a configuration.
            tokenizer: folder with tokenizer.json, its file, or a SentencePiece model.
            flags: flags of pretrain_gpt.py, by their names with underscores; they override ``config``.

        Raises:
            ConfigurationError: a flag is unknown, or the flags do not fit together; with every problem.
        """
        settings = settings_of(config, flags, tokenizer)
        refuse_misplaced(settings.values, "GPT.build")
        return cls(settings, read_launch(), "GPT.build")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], **flags: Any) -> GPT:
        """Load a model, with optimizer and progress if the folder is of a run.

        Args:
            folder: a ``save`` folder of this class or of a training (native, or Megatron-LM's formats), a checkpoint in
                it, or a Hugging Face model.
            flags: flags that replace those that the run recorded, such as ``tensor_model_parallel_size``, ``ckpt_step``
                and ``finetune``.

        Raises:
            ConfigurationError: a flag is unknown, or the flags do not fit together.
            CheckpointError: there is no checkpoint, or it cannot be read.
        """
        refuse_misplaced(flags, "GPT.load")
        launch, place = read_launch(), os.fspath(folder)
        settings = loaded_settings(place, _recorded(place, flags.get("ckpt_step")), flags)
        model = cls(settings, launch, "GPT.load")
        model._state.load(model.config)
        model.config = model._state.config = without_load(model.config)
        model._settings = kept_settings(model.config)
        return model

    def fit(
        self, data: object = None, steps: int | None = None, *, callbacks: Sequence[Callback] = (), **flags: Any
    ) -> TrainingHistory:
        """Train, and return the iterations of this call. A later call continues.

        The schedule and the order of the data cover ``train_iters`` iterations, or all iterations up to the end of this
        call if that is more. Flags and data apply to later calls too. Ctrl-C ends the training after the current step:
        the model is usable, and this raises KeyboardInterrupt.

        Args:
            data: token files, a text file, texts, tokens, or a data set; None for the flags' data, or the earlier data.
                All of it is training data unless ``split`` is given.
            steps: number of iterations; None trains up to ``train_iters``.
            callbacks: called at the hooks of the training, see `Callback`.
            flags: flags of pretrain_gpt.py, such as ``lr`` and ``global_batch_size``.

        Raises:
            ConfigurationError: a flag is unknown, would change the model, or does not fit the others.
            InputError: the data cannot be used.
            TrainingError: the run failed, for example because the loss is not finite.
        """
        if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
            raise ConfigurationError(
                f"GPT.fit: callbacks is {callbacks!r}; pass a list of objects of subclasses of "
                "megatron.training.callbacks.Callback"
            )
        settings, provider, chosen = self._with_data(data, flags)
        config, last = self._plan_training(settings, provider, steps)
        provider(config, self.tokenizer, sample_targets(config, self._state.held.train_state), ignore_line).check()
        self._settings, self._provider, self._chosen = settings, provider, chosen
        self._state.held.last_iteration = last
        self._engine = None
        self._state.adapt(config)
        self.config = config
        keep_arguments(config)
        recorder = Recorder(TrainingHistory())
        providers = (provide_model, self._provider, forward_step)
        program = Program(
            self._launch, self.tokenizer, *providers, (recorder, *callbacks), time.time(), config.logging.brief_log
        )
        try:
            with _finishing_step() as was_interrupted:
                train_held(config, self._state.runtime, program, self._state.held)
        finally:
            self.history.extend(recorder.history)
        is_stopped = recorder.history.stop_reason is not None
        if is_stopped and any_rank(was_interrupted(), self._state.runtime.state.world):
            raise KeyboardInterrupt(recorder.history.stop_reason)
        return recorder.history

    def _with_data(self, data: object, flags: Mapping[str, Any]) -> tuple[Settings, DatasetsProvider, tuple[str, ...]]:
        """Return the settings of a training, the function that provides its data, and the flags that follow from it.

        Raises:
            ConfigurationError: a flag does not belong here, or the data is none of the accepted kinds.
        """
        refuse_misplaced(flags, "GPT.fit")
        sources: tuple[str, ...] = SOURCES
        if is_registered("data set", flags.get("dataset", self._settings.values.get("dataset"))):
            sources = (*SOURCES, "dataset")
        named = [name for name in sources if name in flags]
        if data is not None and named:
            raise ConfigurationError([f"GPT.fit: data and {name} both name data; omit one" for name in named])
        if data is None and not named:
            return self._settings.updated(flags), self._provider, self._chosen
        settings = self._settings.without(self._chosen).updated(flags)
        if data is None:
            return settings, provide_datasets, ()
        config, _ = settings.resolve("GPT.fit", self._launch.world_size, has_data=False)
        found, given = flags_of_data(data, self.tokenizer, config.data, "GPT.fit"), config.logging.given_arguments
        defaults = {} if "split" in given else {"split": "1,0,0", "eval_iters": 0}
        values = {**dict.fromkeys(sources), "mock_data": False, **defaults, **found.values}
        free = {name: value for name, value in values.items() if name in sources or name not in given}
        return settings.updated(free), found.provider, tuple(free)

    def _plan_training(
        self, settings: Settings, provider: DatasetsProvider, steps: int | None
    ) -> tuple[RunConfig, int]:
        """Return the configuration of a training, and its last iteration.

        Raises:
            ConfigurationError: the number of steps or a flag is wrong.
        """
        if steps is not None:
            _check_count(steps, "GPT.fit: steps")
        done, world_size = self.iteration, self._launch.world_size
        planned, _ = settings.resolve("GPT.fit", world_size, has_data=False)
        last = planned.train_iters if steps is None else done + steps
        if last <= done:
            raise ConfigurationError(
                f"GPT.fit: all {planned.train_iters} iterations of train_iters are done; pass steps"
                if planned.train_iters
                else "GPT.fit: the number of iterations is missing; pass steps"
            )
        if not planned.training.train_samples:
            settings = settings.updated({"train_iters": max(planned.train_iters, last)})
        elif last > planned.train_iters:
            raise ConfigurationError(
                f"GPT.fit: train_samples {planned.training.train_samples} ends at iteration {planned.train_iters}, "
                f"before {steps} more; pass {planned.train_iters - done} steps or fewer, or more train_samples"
            )
        config, notes = settings.resolve("GPT.fit", world_size, has_data=True, needs_files=provider is provide_datasets)
        refuse_misplaced(vars(config.training), "GPT.fit")
        config = with_chosen_values(config, self.config)
        refuse_other_model(config, self.config, "GPT.fit")
        if config.data.train_data:
            config = with_tokenized_text(config, is_reporter=False)
        for note in notes if self._launch.rank == 0 else ():
            print_line(note)
        return config, last

    def evaluate(self, data: object, steps: int | None = None) -> float:
        """Return the mean loss per token of data that is given as in `fit`, each sample once.

        Args:
            data: token files, a text file, texts, tokens, or a data set.
            steps: evaluate only the first samples, as many as this number of global batches.

        Raises:
            InputError: the data cannot be used.
        """
        if steps is not None:
            _check_count(steps, "GPT.evaluate: steps")
        dataset = self._evaluation_data(data)
        training, runtime = self.config.training, self._state.runtime
        size = len(dataset) if steps is None else min(len(dataset), steps * training.global_batch_size)
        number = -(-size // (training.micro_batch_size * self.config.data_parallel_size))
        vocab_size = self.tokenizer.vocab_size
        with closing(BatchSource(dataset, self.config, runtime, vocab_size, 0, size, evaluates=True)) as source:
            return evaluate(self.config, runtime, self._state.held.parts, forward_step, source, number)

    def _evaluation_data(self, data: object) -> SampleDataset:
        found = flags_of_data(data, self.tokenizer, self.config.data, "GPT.evaluate")
        values: dict[str, Any] = {
            **dict.fromkeys(SOURCES, ()),
            "data_args_path": None,
            "per_split_data_args_path": None,
        }
        values |= {name: tuple(value) for name, value in found.values.items() if name in SOURCES}
        values |= {"mock_data": False, "split": "0,1,0"}
        if self.config.data.is_registered:
            values["dataset"] = None
        config = dataclasses.replace(self.config, data=dataclasses.replace(self.config.data, **values))
        if config.data.train_data:
            config = with_tokenized_text(config, is_reporter=False)
        if found.provider is provide_datasets:
            builder = BlendedDatasetBuilder(dataset_config(config, self.tokenizer), (0, None, 0), ignore_line)
            dataset = run_on_all_ranks(lambda: builder.build().valid, self._state.runtime.state.world)
        else:
            provided = found.provider(config, self.tokenizer, SampleTargets(train=0, valid=None, test=0), ignore_line)
            provided.check()
            dataset = provided.build().train
        if isinstance(dataset, ExternalSamples):
            raise DataError("GPT.evaluate: a source of micro-batches has no end; pass a data set with a length")
        if dataset is None or not len(dataset):
            raise DataError(
                f"GPT.evaluate: the data has less than one sample of seq_length {config.data.seq_length} tokens; pass "
                "more data"
            )
        return dataset

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        *,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        stops_at_end: bool = True,
        **sampling: Any,
    ) -> Any:
        """Continue one prompt or several, and return each prompt with its continuation.

        Args:
            prompt: a text, a list of texts, token ids, or a list of these.
            max_new_tokens: maximum number of new tokens; the end-of-document token ends a text before. None: 64, or
                the rest of the context after the longest prompt.
            num_beams: beam search with this number of beams, with ``length_penalty`` and ``early_stopping``.
            stops_at_end: False continues after the end-of-document token.
            sampling: fields of `SamplingConfig`: ``greedy``, ``temperature`` (0 is greedy), ``top_k``, ``top_p``,
                ``seed``, ``repetition_penalty``, ``no_repeat_ngram_size``.

        Returns:
            A text for a text, token ids for token ids, and a list for a list.

        Raises:
            ConfigurationError: a sampling parameter is unknown or invalid.
            InputError: a prompt is empty or too long.
        """
        if max_new_tokens is not None:
            _check_count(max_new_tokens, "GPT.generate: max_new_tokens")
        _check_count(num_beams, "GPT.generate: num_beams")
        prompts, is_text, is_one = self._prompts(prompt)
        if max_new_tokens is None:
            max_new_tokens = new_tokens_that_fit(self.config.model, [*map(len, prompts)], _DEFAULT_NEW_TOKENS)
        end = self.tokenizer.eod_id if stops_at_end else None
        request = GenerationRequest(
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            sampling=_sampling(sampling),
            stop=StopRule(end_tokens=frozenset() if end is None else frozenset((end,))),
            beams=_beams(num_beams, length_penalty, early_stopping),
        )
        found = self._open_engine().generate(request)
        results: list[Any]
        if is_text:
            texts = [prompt] if isinstance(prompt, str) else [str(text) for text in prompt]
            results = [
                self._continued(text, tokens, each.tokens)
                for text, tokens, each in zip(texts, prompts, found, strict=True)
            ]
        else:
            results = [[*tokens, *each.tokens] for tokens, each in zip(prompts, found, strict=True)]
        return results[0] if is_one else results

    def _continued(self, text: str, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return a text with its continuation; tokens are decoded together, because some decode to a space then."""
        before, whole = self.tokenizer.detokenize(prompt), self.tokenizer.detokenize([*prompt, *new])
        return text + whole[len(before) :] if whole.startswith(before) else whole

    def _prompts(self, prompt: Any) -> tuple[tuple[tuple[int, ...], ...], bool, bool]:
        """Return the tokens of each prompt, whether they are texts, and whether there is only one, not in a list."""
        if isinstance(prompt, str):
            return (tuple(self.tokenizer.tokenize(prompt)),), True, True
        if isinstance(prompt, torch.Tensor | np.ndarray):
            prompt = prompt.tolist()
        items = list(prompt)
        if items and all(isinstance(item, str) for item in items):
            return tuple(tuple(self.tokenizer.tokenize(item)) for item in items), True, False
        if items and all(isinstance(item, int | np.integer) for item in items):
            return (tuple(map(int, items)),), False, True
        if items and all(isinstance(item, list | tuple | np.ndarray | torch.Tensor) for item in items):
            return tuple(tuple(map(int, item)) for item in items), False, False
        raise ConfigurationError(
            "GPT.generate: the prompt is neither a text nor token ids; pass one of these, or a list"
        )

    @torch.no_grad()
    def logits(self, tokens: Tokens) -> torch.Tensor:
        """Return the logits at each position, on every rank, without a gradient.

        Shapes: ``[s] or [b, s] -> [b, s, v]`` in the model's precision, ``v`` without padding. A text is one row.

        Raises:
            InputError: a token is outside the vocabulary, or there are too few learned positions.
        """
        rows = self._rows(tokens)
        engine = self._open_engine()
        config, state, staged = engine.model.config, engine.state, engine.staged
        prompts = tuple(map(tuple, rows.tolist()))
        check_request(config, GenerationRequest(prompts=prompts, max_new_tokens=0, log_probabilities=True))
        rows = rows.to(staged.device)
        positions = torch.arange(rows.shape[1], device=staged.device).expand_as(rows)
        output = staged.forward(rows, positions, CAUSAL, KeyValueCache(rows.shape[1]), last_position_only=False)
        staged.finish()
        shape = (*rows.shape, config.vocab_size)
        if output is None:
            dtype = next(engine.model.parameters()).dtype
            whole = torch.empty(shape, dtype=dtype, device=staged.device)
        else:
            whole = all_gather_last_dim(output, state.tp)[..., : config.vocab_size].transpose(0, 1).contiguous()
        if state.pp.size > 1:
            staged.share(whole, output)
        return whole

    def loss(self, tokens: Tokens) -> torch.Tensor:
        """Return the mean loss of the tokens after the first, in float32 or better, without a gradient.

        Shapes: ``[s] or [b, s] -> []``. A text is one row.

        Raises:
            InputError: a token is outside the vocabulary, or a row has fewer than two tokens.
        """
        rows = self._rows(tokens)
        if rows.shape[1] < 2:
            raise InputError(f"GPT.loss: {rows.shape[1]} tokens have no next token to predict; pass two or more")
        last, vocab_size = rows[:, -1], self.config.model.vocab_size
        if not 0 <= int(last.min()) <= int(last.max()) < vocab_size:
            raise InputError(f"GPT.loss: a last token is outside the model's vocabulary 0..{vocab_size - 1}")
        logits = self.logits(rows[:, :-1])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten().to(logits.device))

    def _rows(self, tokens: Tokens) -> torch.Tensor:
        """Return token ids ``[b, s]``."""
        if isinstance(tokens, str):
            tokens = self.tokenizer.tokenize(tokens)
            if not tokens:
                raise InputError("the text has no tokens; at least one is required")
        elif isinstance(tokens, list | tuple) and any(isinstance(row, str) for row in tokens):
            raise InputError("the tokens are a list of texts; pass one text at a time, or rows of tokens")
        try:
            rows = torch.as_tensor(tokens)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"the tokens are not an array of numbers: {error}; pass rows of the same length"
            ) from error
        if rows.ndim not in (1, 2) or rows.is_floating_point() or not rows.numel():
            raise InputError(
                f"the tokens have the shape {list(rows.shape)} and the dtype {rows.dtype}; pass integers [s] or [b, s]"
            )
        return rows.reshape(-1, rows.shape[-1]).long()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield this rank's parameters, or their shards; take them again after `fit`, which may build others."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the name and the tensor of each of this rank's parameters, named as in the checkpoint."""
        for wrapped, chunk in zip(self._state.held.parts.ddp_chunks, self._state.held.parts.chunks, strict=True):
            wrapped.finish_param_gather()
            yield from chunk.named_parameters()

    @property
    def iteration(self) -> int:
        """Number of completed iterations, including those before a load."""
        return self._state.held.train_state.iteration

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save a checkpoint that `load` and every command reads, in the format of ``ckpt_format``.

        ``megatron train --continue`` continues the training if its data are files, unless they were temporary.

        Raises:
            MegatronError: it cannot be written.
        """
        place = os.fspath(folder)
        self._state.save(place)
        if self._state.runtime.is_reporter:
            config = dataclasses.replace(
                self.config, checkpoint=dataclasses.replace(self.config.checkpoint, save=place)
            )
            RunRecord(config, self._launch, self.iteration, print_line).end(self.iteration, None)

    def to_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face model with its tokenizer, which transformers loads.

        Raises:
            InputError: no Hugging Face architecture expresses the model, or the folder cannot be written.
        """
        if self.config.model.lora_rank:
            raise ConfigurationError(
                "GPT.to_hf: the model has LoRA adapters; save it, and merge them with megatron convert FOLDER "
                "--merge-lora --saver hf --save-dir DIR, or write them alone with --saver peft"
            )
        target, world = Path(folder).absolute(), self._state.runtime.state.world
        staging = target.with_name(f".{target.name}-native")
        try:
            self._state.save(str(staging), no_save_optim=True, no_save_rng=True, ckpt_format="megatron")
            run_on_all_ranks(lambda: _convert(staging, target) if world.is_first else None, world)
        finally:
            if world.is_first:
                shutil.rmtree(staging, ignore_errors=True)

    def _open_engine(self) -> InferenceEngine:
        """Return the engine that generates with the current parameters; collective when it is created."""
        if self._engine is None:
            state = self._state
            self._engine, _ = open_engine(self.config, state.runtime, state.held.parts, "GPT.generate")
        for chunk in self._state.held.parts.ddp_chunks:
            chunk.finish_param_gather()
        return self._engine

    def __repr__(self) -> str:
        """Return the shape of the model and its progress."""
        model = self.config.model
        shape = f"num_layers={model.num_layers}, hidden_size={model.hidden_size}, vocab_size={model.vocab_size}"
        return f"GPT({shape}, iteration={self.iteration})"


def _recorded(folder: str, ckpt_step: int | None) -> dict[str, Any]:
    """Return the flags of training that a native checkpoint records, or none for a checkpoint of another format.

    Without optimizer state in the checkpoint, they include ``no_load_optim``.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    place = as_path(folder)
    found = candidate_folders(place, ckpt_step) if place.exists() else []
    if not found:
        wrong = "contains no checkpoint" if place.exists() else "does not exist"
        raise CheckpointError(
            f"GPT.load: {folder} {wrong}; pass the folder that a run saved to, or the folder of a model"
        )
    if detect_format(found[0]) != "native":
        return {}
    values = recorded_values(RunConfig.from_dict(recorded_config(found[0])))
    has_optimizer = read_index_file(found[0])["common"]["optimizer"] is not None
    return values if has_optimizer else {**values, "no_load_optim": True}


def _check_count(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}; pass a whole number of 1 or more")


def _sampling(values: Mapping[str, Any]) -> SamplingConfig:
    names = [field.name for field in dataclasses.fields(SamplingConfig)]
    unknown = [name for name in values if name not in names]
    if unknown:
        possible = [*inspect.getfullargspec(GPT.generate).args[1:], *inspect.getfullargspec(GPT.generate).kwonlyargs]
        possible += names
        nearest = difflib.get_close_matches(unknown[0], possible, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"possible: {', '.join(possible)}"
        raise ConfigurationError(f"GPT.generate: unknown argument {unknown[0]}; {hint}")
    for name, value in values.items():
        kind = type(getattr(SamplingConfig, name))
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, int | kind):
            raise ConfigurationError(f"GPT.generate: {name} is {value!r}; pass {_KINDS[kind]}")
    chosen = dict(values)
    if chosen.get("temperature") == 0:
        chosen = {**chosen, "temperature": 1.0, "greedy": True}
    return SamplingConfig(**chosen)


def _beams(num_beams: int, length_penalty: float, early_stopping: bool | Literal["never"]) -> BeamConfig | None:
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, int | float):
        raise ConfigurationError(f"GPT.generate: length_penalty is {length_penalty!r}; pass {_KINDS[float]}")
    if num_beams == 1:
        if length_penalty != 1.0 or early_stopping is not False:
            raise ConfigurationError(
                "GPT.generate: length_penalty and early_stopping are for beam search; pass num_beams of 2 or more, or "
                "omit them"
            )
        return None
    return BeamConfig(num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping)


def _convert(source: Path, target: Path) -> None:
    request = ConversionRequest(
        load_dir=source,
        save_dir=target,
        loader="native",
        saver="hf",
        ckpt_step=None,
        target=Target(keeps_optimizer=False),
        true_vocab_size=None,
        tokenizer={},
        told={},
        verify=True,
        test_logits=False,
    )
    convert(request, ignore_line)


@contextlib.contextmanager
def _finishing_step() -> Iterator[Any]:
    """Turn the first Ctrl-C into SIGTERM, on which training finishes its step; the context is a function that tells.

    Before training watches SIGTERM, and the second time, Ctrl-C raises KeyboardInterrupt as usual.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if received or signal.getsignal(signal.SIGTERM) == before:
            raise KeyboardInterrupt
        received.append(number)
        print_line("\nstopping after this step; Ctrl-C once more ends it at once", sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)
