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

import atexit
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.config import command_line_fields
from megatron.core.errors import ConfigurationError
from megatron.core.registry import add_registered, add_script, registered_scripts
from megatron.training.exit_reason import is_own_rank, refuse, run_program
from megatron.training.initialize import read_launch_environment

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    import torch
    from torch import nn

    from megatron.core.tensor_parallel import LossInputs
    from megatron.core.transformer import DecoderConfig
    from megatron.training.callbacks import Callback
    from megatron.training.data_plan import DatasetsProvider
    from megatron.training.model_setup import ModelProvider
    from megatron.training.training_step import ForwardStep

__all__ = ["pretrain", "register_activation", "register_attention", "register_loss", "register_norm"]
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
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Train as the command line says, then end the program with the run's exit status.

    Args:
        model_provider: builds one model chunk of this rank; by default a GPT.
        datasets_provider: builds the data sets; by default those that the flags name.
        forward_step: computes the loss of a micro-batch; by default that of a GPT.
        callbacks: objects whose hooks the run calls, see `megatron.training.callbacks.callback.Callback`.
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
