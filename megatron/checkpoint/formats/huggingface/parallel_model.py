"""A transformers model whose forward pass tensor-parallel worker processes compute, changed in place."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron.checkpoint.formats.huggingface.worker_pool import WorkerPool
from megatron.core.device import select_device
from megatron.core.errors import ConfigurationError

_MEMORY_METHODS = {
    "memory_allocated": "allocated",
    "memory_reserved": "reserved",
    "memory_cached": "reserved",
    "memory_chached": "reserved",  # as Parallelformers' README spells it
}
_UNSUPPORTED_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")

_POSITIONS_BY_MASK = ("opt",)
"""Architectures whose positions count the tokens that the attention mask has so far; padding has position -1."""
_DISTANCES_BY_MASK = ("bloom",)
"""Architectures in which the distance of two tokens does not count padding between them."""


class ParallelModel:
    """Connection of a transformers model to the worker processes that compute its forward pass.

    The methods of the model that change are attributes of the instance. `release` removes them and ends the processes.
    The model is then as it was before, except that another call of ``deparallelize`` does nothing. The model does not
    need this object, which lives as long as the model.
    """

    def __init__(self, model: Any, pool: WorkerPool) -> None:
        self.pool = pool
        # Without a reference cycle, the processes end with the last reference to the model.
        self._reference = weakref.ref(model)
        self._lock = threading.RLock()
        self._is_generating = False
        self._signature = inspect.signature(model.forward)
        self._was_training = model.training
        methods: dict[str, Callable[..., Any]] = {
            "forward": self._forward,
            "generate": self._generate,
            "deparallelize": self.release,
            "to": self._move_to,
            "cuda": self._move_to_cuda,
            "_apply": self._apply,
            **{name: self._reader_of(value) for name, value in _MEMORY_METHODS.items()},
        }
        former = {name: vars(model)[name] for name in methods if name in vars(model)}
        self._former = {name: method for name, method in former.items() if method is not _stay_plain}
        for name, method in methods.items():
            setattr(model, name, _with_signature(method, getattr(model, name, None)))
        self._names = tuple(methods)
        model.eval()

    @property
    def _model(self) -> Any:
        model = self._reference()
        assert model is not None, "only the model's methods use it"
        return model

    def release(self) -> None:
        """End the processes and restore the model."""
        model = self._model
        with self._lock:
            for name in self._names:
                vars(model).pop(name, None)
            vars(model).update(self._former)
            model.deparallelize = _stay_plain
            model.train(self._was_training)
            self.pool.close()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate`` of transformers. The processes keep the KV cache, so it passes whole rows of tokens."""
        if kwargs.get("past_key_values") is not None:
            raise ConfigurationError("past_key_values: the processes keep the KV cache; omit it, pass the whole text")
        model = self._model
        with self._lock:
            self._is_generating = True
            try:
                return type(model).generate(model, *args, **{**kwargs, "use_cache": False})
            finally:
                self._is_generating = False

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits of the processes, and the loss if there are labels, as ``forward`` of the model does."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        model = self._model
        given = _by_name(self._signature, args, kwargs)
        ids, labels, kept = given.pop("input_ids", None), given.pop("labels", None), given.pop("logits_to_keep", 0)
        mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        as_object = given.pop("return_dict", model.config.return_dict)
        self._check(model, ids, mask, positions, given)
        request = {
            "kind": "logits",
            "tokens": ids.tolist(),
            "mask": torch.ones_like(ids).tolist() if mask is None else mask.long().tolist(),
            "positions": _positions(model, ids, mask, positions).expand(ids.shape).tolist(),
            "num_last": kept if isinstance(kept, int) else 0,
        }
        with self._lock:  # from other threads: after the generation in progress
            first = self.pool.ask(request | {"keeps_cache": self._is_generating})[0]
        shape, dtype = first.values["shape"], getattr(torch, first.values["dtype"])
        logits = torch.frombuffer(bytearray(first.payload), dtype=dtype).view(shape).to(ids.device)
        if isinstance(kept, torch.Tensor):
            logits = logits[:, kept]
        loss = None
        if labels is not None:
            loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)
        if not as_object:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _check(self, model: Any, ids: Any, mask: Any, positions: Any, others: dict[str, Any]) -> None:
        """Reject arguments that the processes cannot follow.

        Raises:
            ConfigurationError: there are such arguments.
        """
        if model.training:
            raise ConfigurationError("the model is in training mode; parallelize is for inference: call model.eval()")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.numel() == 0:
            found = f"shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ConfigurationError(f"input_ids of {found}; a tensor of shape [b, s] is required")
        for name, value in (("attention_mask", mask), ("position_ids", positions)):
            shapes = [ids.shape] if name == "attention_mask" else [ids.shape, (1, ids.shape[1]), ids.shape[1:]]
            if value is not None and value.shape not in shapes:
                raise ConfigurationError(
                    f"{name} of shape {list(value.shape)} with input_ids of {list(ids.shape)}; the shapes must be equal"
                )
        is_by_mask = mask is not None and model.config.model_type in _DISTANCES_BY_MASK
        if is_by_mask and bool(((mask.bool().int().diff(dim=1) > 0).sum(dim=1) + mask[:, 0].bool() > 1).any()):
            raise ConfigurationError(
                f"attention_mask has padding between tokens, which a parallel {model.config.model_type} model does not "
                "support; pad on the left or on the right"
            )
        defaults = model.config.to_dict()
        switches = {name: defaults.get(name, False) for name in _UNSUPPORTED_OUTPUTS} | others
        if wrong := [name for name, value in switches.items() if not isinstance(value, bool) or value]:
            raise ConfigurationError(
                f"{', '.join(wrong)}: a parallel model computes logits and loss, and keeps the KV cache itself; omit "
                f"{'it' if len(wrong) == 1 else 'them'}, or call model.deparallelize() first"
            )

    def _move_to(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the model and move it; on a node without GPU, ``cuda`` is the CPU, as in the processes."""
        model = self._model
        self.release()
        asked = kwargs.get("device", args[0] if args else None)
        if isinstance(asked, str | int | torch.device) and _is_absent(asked):
            args, kwargs = (("cpu", *args[1:]), kwargs) if args else (args, kwargs | {"device": "cpu"})
        return model.to(*args, **kwargs)

    def _move_to_cuda(self, device: Any = None) -> Any:
        return self._move_to("cuda" if device is None else device)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the model before its weights change, whose copies the processes hold."""
        model = self._model
        self.release()
        return model._apply(*args, **kwargs)

    def _reader_of(self, value: str) -> Callable[[], dict[str, int]]:
        def read() -> dict[str, int]:
            with self._lock:
                replies = self.pool.ask({"kind": "memory", "detailed": False})
            return {reply.values["device"]: reply.values[value] for reply in replies}

        return read


def _stay_plain() -> None:
    """Do nothing: the model is not parallel any more."""


def is_parallel(model: Any) -> bool:
    """Return whether processes compute the forward pass of a transformers model."""
    return vars(model).get("deparallelize", _stay_plain) is not _stay_plain


def _is_absent(device: str | int | torch.device) -> bool:
    """Return whether the device is a GPU on a node without GPU, and then say so."""
    if isinstance(device, str) and not device.startswith("cuda"):
        return False
    if isinstance(device, torch.device) and device.type != "cuda":
        return False
    if select_device(0).is_cuda:
        return False
    print("no CUDA device: the model is on the CPU", file=sys.stderr, flush=True)
    return True


def _with_signature(method: Callable[..., Any], former: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the method with the signature of the one that it replaces, which transformers inspects."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    if former is not None:
        call.__signature__ = inspect.signature(former)  # type: ignore[attr-defined]
    return call


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that are None."""
    bound = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return {name: value for name, value in bound.items() if value is not None}


def _positions(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor:
    """Return the positions that transformers uses. Shapes: ``ids, mask: [b, s] -> [b, s]``, or ``[s]`` for all rows."""
    if given is not None:
        return given
    if mask is None or model.config.model_type not in _POSITIONS_BY_MASK:
        return torch.arange(ids.shape[1])
    present = mask.long()
    return present.cumsum(dim=1) * present - 1
