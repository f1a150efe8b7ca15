"""Extend a run from a script of one's own: register parts under names that flags select, and train with them.

The script registers at its top level, and starts training only if it is the program that runs::

    from megatron.training import pretrain, register_activation

    register_activation("mish", torch.nn.functional.mish)

    if __name__ == "__main__":
        pretrain()

``megatron train --script FILE`` and torchrun run it instead of ``pretrain_gpt.py``. The other commands import it with
``--script FILE``. Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.config import (
    ExtraArgsProvider,
    RunConfig,
    all_flags,
    argument_values,
    command_line_fields,
    declare_arguments,
)
from megatron.core.errors import ConfigurationError
from megatron.core.registry import add_registered, add_script, registered_scripts
from megatron.training.exit_reason import is_own_rank, refuse, run_program
from megatron.training.initialize import read_launch_environment

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    import torch
    from torch import nn

    from megatron.core.tensor_parallel import LossInputs
    from megatron.core.tokenizers import Tokenizer
    from megatron.core.transformer import DecoderConfig
    from megatron.training.callbacks import Callback
    from megatron.training.data_plan import DatasetsProvider
    from megatron.training.loggers import RunLogger
    from megatron.training.model_setup import ModelProvider
    from megatron.training.training_step import ForwardStep

__all__ = [
    "get_args",
    "pretrain",
    "register_activation",
    "register_attention",
    "register_callback",
    "register_dataset",
    "register_logger",
    "register_loss",
    "register_lr_schedule",
    "register_norm",
    "register_optimizer",
]
"""The public API of scripts, which docs/extending.md lists with its version."""

_MODULE_NAME = "megatron_script"
"""``__name__`` of a script that a command imports for its registrations."""
_importing: list[Path] = []
_calls_pretrain: list[bool] = []
"""Not empty once `pretrain` was called."""


def register_activation(name: str, function: Callable[[torch.Tensor], torch.Tensor], *, gated: bool = False) -> None:
    """Register an activation of the feed-forward layers and experts, selected by ``--activation-func NAME``.

    Args:
        name: the value of the flag.
        function: an elementwise function of torch, ``[..., n] -> [..., n]``, that autograd differentiates. Its
            argument is a shard of the channels.
        gated: whether fc1 has twice as many output channels, of which ``function(gate) * linear`` is the activation.

    Raises:
        ConfigurationError: there is an activation of this name, or the name cannot be the value of a flag.
    """
    _register("activation", name, function, gated=gated)


def register_norm(name: str, module: Callable[[int, float], nn.Module]) -> None:
    """Register a normalization for every norm of the model, selected by ``--normalization NAME``.

    Args:
        name: the value of the flag.
        module: a class or function that is called with the width ``n`` and ``--norm-epsilon``, and returns a module
            ``[..., n] -> [..., n]``. All values of a parameter of the module start from the same number. The norm of a
            tensor-parallel rank sees a part of the positions, and with --qk-layernorm a part of the heads.

    Raises:
        ConfigurationError: there is a norm of this name, or the name cannot be the value of a flag.
    """
    _register("normalization", name, module)


def register_attention(
    name: str,
    module: Callable[..., nn.Module],
    *,
    multiply_adds: Callable[[DecoderConfig], float] = lambda config: 0.0,
) -> None:
    """Register an attention module for all layers, selected by ``--attention NAME``.

    Args:
        name: the value of the flag.
        module: a class with the constructor and the ``forward`` of `megatron.core.transformer.SelfAttention`, usually a
            subclass of it, or with MLA of `megatron.core.transformer.LatentAttention`. Its parameters have a
            `ParamSpec`, as those of the layers in `megatron.core.tensor_parallel`.
        multiply_adds: function of the model's configuration that returns the multiply-adds per token and layer in
            matmuls that self-attention does not have, for the reported FLOP/s.

    Raises:
        ConfigurationError: there is an attention of this name, or the name cannot be the value of a flag.
    """
    _register("attention", name, module, multiply_adds=multiply_adds)


def register_loss(name: str, function: Callable[[LossInputs], torch.Tensor]) -> None:
    """Register a loss for training, selected by ``--loss NAME``; evaluation reports the cross-entropy.

    Args:
        name: the value of the flag.
        function: returns the loss of every token, ``[s, b]``, from the logits and labels of a micro-batch, see
            `megatron.core.tensor_parallel.LossInputs`. The loss mask is applied to the result, and the mean over all
            counted tokens of the global batch is minimized. With multi-token prediction the batch also has the
            sequences of its modules.

    Raises:
        ConfigurationError: there is a loss of this name, or the name cannot be the value of a flag.
    """
    _register("loss", name, function)


def pretrain(
    *,
    model_provider: ModelProvider | None = None,
    datasets_provider: DatasetsProvider | None = None,
    forward_step: ForwardStep | None = None,
    callbacks: Sequence[Callback] = (),
    extra_args: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] = MappingProxyType({}),
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Train as the command line says, then end the program with the run's exit status.

    Args:
        model_provider: builds one model chunk of this rank; by default a GPT.
        datasets_provider: builds the data sets; by default those that the flags name.
        forward_step: computes the loss of a micro-batch; by default that of a GPT.
        callbacks: objects whose hooks the run calls, see `megatron.training.callbacks.callback.Callback`.
        extra_args: adds flags of the script to the parser that it gets, as Megatron's ``extra_args_provider`` does.
            `get_args` and ``config.extra`` have their values, and checkpoints record them.
        args_defaults: the script's defaults of flags, by name; the command line, presets and files override them.
        argv: the flags; by default those of the command line.

    Raises:
        ConfigurationError: a command imports the script only for its registrations.
    """
    if _importing:
        raise ConfigurationError(
            f'--script {_importing[-1]} calls pretrain() when it is imported; call it under if __name__ == "__main__":'
        )
    # The command line is in a layer above this one.
    main = importlib.import_module("megatron.cli.pretrain").main
    _calls_pretrain.append(True)
    try:
        declare_arguments(extra_args, args_defaults, all_flags())
    except ConfigurationError as error:
        sys.exit(refuse(error.problems, read_launch_environment().rank))
    add_script(str(Path(sys.argv[0]).resolve()))
    words = sys.argv[1:] if argv is None else argv
    given = {"model_provider": model_provider, "datasets_provider": datasets_provider, "forward_step": forward_step}
    parts: dict[str, Any] = {name: part for name, part in given.items() if part is not None}
    run_program(lambda: main(words, callbacks=callbacks, **parts))


def import_script(path: str) -> None:
    """Run the top level of a script for its registrations, with its folder in ``sys.path`` as Python does.

    Raises:
        ConfigurationError: the file does not exist, or a registration in it is invalid.
    """
    script = Path(path)
    if not script.is_file():
        raise ConfigurationError(f"--script {path} does not exist; pass a Python training script")
    folder = str(script.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _importing.append(script)
    try:
        runpy.run_path(path, run_name=_MODULE_NAME)
    finally:
        _importing.pop()


def get_args() -> argparse.Namespace:
    """Return all arguments of the run by Megatron's names, those of ``extra_args`` included, as Megatron does.

    Raises:
        RuntimeError: the command line has not been read yet.
    """
    values = kept_arguments()
    if values is None:
        raise RuntimeError("there are no arguments yet: call get_args() in a function that the run calls")
    return _Arguments(**values)


class _Arguments(argparse.Namespace):
    """Arguments of the run, whose error for an unknown name says where the flags of a script are known."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"there is no argument {name}; if extra_args adds it, only the script itself knows it: use megatron train "
            "--script FILE, with --explain for a prediction"
        )


class _Run:
    arguments: RunConfig | Mapping[str, Any] | None = None


def keep_arguments(arguments: RunConfig | Mapping[str, Any] | None) -> None:
    """Set what `get_args` returns in this process: the arguments of a configuration, or those of another process."""
    _Run.arguments = arguments


def kept_arguments() -> Mapping[str, Any] | None:
    """Return the values of `get_args`, or None if the command line has not been read yet."""
    arguments = _Run.arguments
    return arguments if arguments is None or isinstance(arguments, Mapping) else argument_values(arguments)


def register_optimizer(
    name: str, factory: Callable[..., torch.optim.Optimizer], *, state_bytes: float | None = None
) -> None:
    """Register an optimizer, selected by ``--optimizer NAME``.

    Args:
        name: the value of the flag.
        factory: a subclass of ``torch.optim.Optimizer``, or a function that returns an optimizer. It is called as
            ``factory(param_groups, lr=..., **options)``, with the options of ``--optimizer-args``. The run sets ``lr``
            and ``weight_decay`` of each group before each step. The state of a parameter is saved if it consists of
            tensors and numbers. A rule that is not elementwise works with data and pipeline parallelism only.
        state_bytes: bytes of float32 state per parameter, for the planner; measured by a trial step if it is None.

    Raises:
        ConfigurationError: there is an optimizer of this name, or the name cannot be the value of a flag.
    """

    def count(words: tuple[str, ...]) -> int:
        from megatron.core.optimizer import measure_state_bytes

        return measure_state_bytes(name, words) if state_bytes is None else round(state_bytes)

    _register("optimizer", name, factory, state_bytes=count)


def register_lr_schedule(name: str, function: Callable[[float], float]) -> None:
    """Register the shape of a learning-rate decay, selected by ``--lr-decay-style`` or ``--lr-wsd-decay-style``.

    Args:
        name: the value of the flag.
        function: returns the remaining fraction of the decay, 1 for ``--lr`` and 0 for ``--min-lr``, from the elapsed
            fraction of its length after the warm-up, from 0 to 1. After the decay the learning rate is ``--min-lr``.

    Raises:
        ConfigurationError: there is a schedule of this name, or the name cannot be the value of a flag.
    """
    _register("learning-rate schedule", name, function)


def register_dataset(name: str, provider: Callable[[RunConfig, Tokenizer], Any]) -> None:
    """Register a data set, selected by ``--dataset NAME``, which needs neither ``--data-path`` nor ``--mock-data``.

    Args:
        name: the value of the flag.
        provider: returns a map-style ``torch.utils.data.Dataset``, which ``--split`` divides if it is given, or a tuple
            of training, validation and test data, each None if there is none. An item is a sequence of at most
            ``--seq-length`` + 1 tokens, or a dictionary, see `megatron.training.registered_dataset.MapStyleDataset`. It
            must depend only on its index. Every rank calls the provider, rank 0 first.

    Raises:
        ConfigurationError: there is a data set of this name, or the name cannot be the value of a flag.
    """
    _register("data set", name, provider)


def register_callback(name: str, factory: Callable[[], Callback]) -> None:
    """Register a callback, which ``--callbacks NAME`` turns on.

    Args:
        name: a value of the flag.
        factory: a subclass of `megatron.training.callbacks.Callback`, or a function that returns an object of one. It
            is called without arguments.

    Raises:
        ConfigurationError: there is a callback of this name, or the name cannot be the value of a flag.
    """
    _register("callback", name, factory)


def register_logger(name: str, factory: Callable[[RunConfig], RunLogger]) -> None:
    """Register a logger, which ``--loggers NAME`` turns on; it gets the metrics of TensorBoard.

    Args:
        name: a value of the flag.
        factory: a subclass of `megatron.training.loggers.RunLogger` whose constructor takes the configuration, or a
            function that returns a logger. Only the reporting rank calls it.

    Raises:
        ConfigurationError: there is a logger of this name, or the name cannot be the value of a flag.
    """
    _register("logger", name, factory)


def _register(kind: str, name: str, value: Callable[..., Any], **properties: Any) -> None:
    """Register a value under a name that no field of this kind has among its choices.

    If the error ends the program, it is reported in one line, with exit status 2.
    """
    fields = [spec for _, spec in command_line_fields() if spec.options.registry == kind]
    built_in = tuple(choice for spec in fields for choice in spec.options.choices or ())
    try:
        add_registered(kind, name, value, built_in, **properties)
    except ConfigurationError:
        sys.excepthook = _report
        raise
    if (script := _running_script()) is not None:
        if not registered_scripts():
            atexit.register(_require_training, script)
        add_script(script)


def _require_training(script: str) -> None:
    """End a rank of ``megatron train`` with status 2 if its script registers parts and then does nothing."""
    has_trained = _calls_pretrain or "megatron.training.training_step" in sys.modules
    if is_own_rank() and not has_trained and getattr(sys, "last_value", None) is None:
        reason = f'--script {script} ends without training; call pretrain() under if __name__ == "__main__":'
        with suppress(SystemExit):  # of a rank that is ended while it waits for rank 0
            refuse([reason], read_launch_environment().rank)
        os._exit(2)


def _running_script() -> str | None:
    """Return the path of the script whose top level is running, directly or in a module that it imports."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    while frame is not None and (frame.f_code.co_name == "<module>" or "importlib" in frame.f_code.co_filename):
        if frame.f_globals.get("__name__") in ("__main__", _MODULE_NAME) and "__file__" in frame.f_globals:
            return str(Path(frame.f_globals["__file__"]).resolve())
        frame = frame.f_back
    return None


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an uncaught error: an invalid registration in one line, any other error as Python does."""
    if not isinstance(error, ConfigurationError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.exit(refuse(error.problems, read_launch_environment().rank))
