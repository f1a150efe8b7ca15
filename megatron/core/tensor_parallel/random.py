"""RNG streams, and megatron-core's tracker of RNG states with the recomputation that restores them.

A run of this framework has one stream, torch's default generator, and derives other random numbers from keys
(`RngStreams`). Code written for megatron-core forks the states of `CudaRNGStatesTracker`, which are those of the CPU
generator on a node without GPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.device import Device, current_device
from megatron.core.ops import DropoutSamples, hash_numbers
from megatron.core.parallel_config import Place
from megatron.core.process_state import (
    forget_process_object,
    get_expert_model_parallel_rank,
    get_expert_tensor_parallel_rank,
    get_tensor_model_parallel_rank,
    process_object,
)
from megatron.core.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

DEFAULT = "default"
"""The stream of torch's default generator, seeded equally on all ranks."""
STREAM_AXES: Mapping[str, tuple[str, ...]] = {DEFAULT: ()}
"""The parallel axes along which a stream differs."""
_NUMBERS_DRAWN = 1 << 62


def stream_seed(seed: int, stream: str, coordinates: tuple[int, ...]) -> int:
    """Return the 63-bit seed of a stream at these rank coordinates."""
    text = f"{seed}\0{stream}\0{','.join(map(str, coordinates))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RngStreams:
    """Seed, save and restore torch's default generator; ``place`` has the rank coordinates.

    Without a ``seed`` the generator is unchanged, for a model that is only described.
    """

    def __init__(self, device: Device, seed: int | None, place: Place) -> None:
        self.device = device
        if seed is not None:
            device.seed_default_generator(seed)
        self._seed = seed
        self._data_parallel_rank = place["dp"]

    def draw_dropout_samples(self, count: int, device: torch.device) -> DropoutSamples:
        """Return dropout samples from a number drawn with the CPU generator, for a pass without explicit samples.

        Ranks with the same generator state get the same samples, except that data-parallel ranks differ.
        """
        number = int(torch.randint(_NUMBERS_DRAWN, ()).item())
        return DropoutSamples.at(hash_numbers(number, self._data_parallel_rank), 0, 0, count, device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of every stream: torch's default generator, as ``default``."""
        return {DEFAULT: self.device.get_rng_state()}

    def resume(self, states: Mapping[str, torch.Tensor], iteration: int) -> None:
        """Restore the given states; a stream without a state is reseeded from the seed and the iteration."""
        if DEFAULT in states:
            self.device.set_rng_state(states[DEFAULT])
        else:
            assert self._seed is not None, "a run has a seed"
            self.device.seed_default_generator(stream_seed(self._seed, DEFAULT, (iteration,)))


_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_EXPERT_PARALLEL_RNG_TRACKER_NAME = "expert-parallel-rng"
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"
_DEFAULT_STATE = "default-rng"
_TRACKER = "rng_tracker"


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the state that differs between expert-parallel ranks."""
    return _EXPERT_PARALLEL_RNG_TRACKER_NAME


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the state that is the same on all tensor-parallel ranks."""
    return _DATA_PARALLEL_RNG_TRACKER_NAME


class CudaRNGStatesTracker:
    """RNG states by name, one of which `fork` makes the state of the device's default generator.

    The device is the current CUDA device, or the CPU if the process may use no GPU.
    """

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        if use_cudagraphable_rng:
            raise RuntimeError("use_cudagraphable_rng=True is unsupported; leave it at False")
        self.use_cudagraphable_rng = use_cudagraphable_rng
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self.reset()

    def is_initialized(self) -> bool:
        """Return whether a state was added or set since the last reset."""
        return self._is_initialized

    def reset(self) -> None:
        """Remove all states."""
        self._is_initialized = False
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()
        self._current_state_name = _DEFAULT_STATE

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self._is_initialized = True
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add the state of a generator with this seed.

        Raises:
            RuntimeError: there is a state with this name or this seed.
        """
        self._is_initialized = True
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        self.seeds_.add(seed)
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        device = current_device()
        outer = device.get_rng_state()
        device.seed_generator(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(outer)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw random numbers from the state of this name inside the context; it keeps its progress.

        Raises:
            RuntimeError: there is no state of this name, or a nested context was left in another order.
        """
        if name not in self.states_:
            raise RuntimeError(f"cuda rng state {name} is not added")
        device, outer_name = current_device(), self._current_state_name
        outer = device.get_rng_state()
        if outer_name != _DEFAULT_STATE:
            self.states_[outer_name] = outer
        device.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            if self._current_state_name != name:
                raise RuntimeError(
                    f"current state name {self._current_state_name} is not the same as the desired state name {name}"
                )
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(outer if outer_name == _DEFAULT_STATE else self.states_[outer_name])
            self._current_state_name = outer_name


class _InferenceRNGTracker(CudaRNGStatesTracker):
    """Tracker without states, for inference, which needs no random numbers of a rank."""

    def add(self, name: str, seed: int) -> None:
        """Do nothing."""

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Change nothing."""
        yield


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Create the process's tracker unless there is one; with ``force_reset`` replace it.

    ``use_te_rng_tracker`` has no effect, as in megatron-core without Transformer Engine.
    """
    if force_reset:
        forget_process_object(_TRACKER)
    kind = _InferenceRNGTracker if inference_rng_tracker else CudaRNGStatesTracker
    process_object(_TRACKER, lambda: kind(use_cudagraphable_rng, inference_rng_tracker))


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """Return the process's tracker, which the first call creates."""
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    return process_object(_TRACKER, CudaRNGStatesTracker)


def get_all_rng_states() -> dict[str, torch.Tensor]:
    """Return the states of the process's tracker by name."""
    return get_cuda_rng_tracker().states_


def convert_cuda_rng_state(
    state: torch.Tensor | torch.Generator, to_graphable: bool = False
) -> torch.Tensor | torch.Generator:
    """Return an RNG state as a tensor, or with ``to_graphable`` as a generator of the current device.

    Raises:
        ValueError: it is neither a tensor nor a generator.
    """
    if not isinstance(state, (torch.Tensor, torch.Generator)):
        raise ValueError(f"Invalid state type: {type(state)}")
    if isinstance(state, torch.Generator):
        return state if to_graphable else state.get_state()
    return torch.Generator(current_device().torch_device).set_state(state) if to_graphable else state


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: CudaRNGStatesTracker) -> bool:
    """Return whether CUDA graphs can capture the tracker's states."""
    return cuda_rng_tracker.use_cudagraphable_rng


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed the device's default generator and the three states of the tracker.

    The default generator and ``data-parallel-rng`` have ``seed``, ``model-parallel-rng`` a seed for each
    tensor-parallel rank, ``expert-parallel-rng`` a seed for each expert-parallel and expert-tensor-parallel rank. Ranks
    are those of the process-wide groups unless they are given.
    """
    tp_rank = get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    ep_rank = get_expert_model_parallel_rank() if ep_rank is None else ep_rank
    etp_rank = get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset=force_reset_rng)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    current_device().seed_generator(seed)
    tracker.add(_DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tp_rank)
    tracker.add(_EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + 100 * ep_rank + (etp_rank or 0))


def _get_all_rng_states() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return torch.get_rng_state(), current_device().get_rng_state(), get_cuda_rng_tracker().get_states()


def _set_all_rng_states(cpu: torch.Tensor, device: torch.Tensor, tracked: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(cpu)
    current_device().set_rng_state(device)
    get_cuda_rng_tracker().set_states(tracked)


@contextlib.contextmanager
def _fork_rng() -> Iterator[None]:
    """Restore all RNG states when the context is left."""
    states = _get_all_rng_states()
    try:
        yield
    finally:
        _set_all_rng_states(*states)


def _detached(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with tensors cut off from the graph, as leaves that require a gradient as before."""
    return tuple(
        arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args
    )


class _Arguments:
    """A function's arguments with the tensors saved by autograd."""

    def __init__(self, ctx: Any, args: Sequence[Any]) -> None:
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        self._others = [None if isinstance(arg, torch.Tensor) else (arg,) for arg in args]

    def restore(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return the arguments with these saved tensors."""
        saved = iter(tensors)
        return tuple(next(saved) if other is None else other[0] for other in self._others)


class CheckpointFunction(torch.autograd.Function):
    """Recomputation of a function with the RNG states of its forward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        """Run the function without saving its activations."""
        ctx.function, ctx.states = function, _get_all_rng_states()
        with torch.no_grad():
            outputs = function(*args)
        ctx.shape = None
        if distribute_saved_activations:
            first = args[0]
            ctx.shape = first.shape
            first.data = split_tensor_into_1d_equal_chunks(first.data, new_buffer=True)
        ctx.arguments = _Arguments(ctx, args)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the function again and return the gradients of its arguments.

        Raises:
            RuntimeError: it is called by ``torch.autograd.grad``.
        """
        inputs = _recomputable(ctx.arguments.restore(ctx.saved_tensors))
        if ctx.shape is not None:
            inputs[0].data = gather_split_1d_tensor(inputs[0].data).view(ctx.shape)
        inputs = _detached(inputs)
        with _fork_rng(), torch.enable_grad():
            _set_all_rng_states(*ctx.states)
            outputs = ctx.function(*inputs)
        _backward(outputs, grads)
        return None, None, *(arg.grad if isinstance(arg, torch.Tensor) else None for arg in inputs)


def _recomputable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
        raise RuntimeError("Checkpointing is not compatible with .grad(), please use .backward() if possible")
    return inputs


def _backward(outputs: Any, grads: Sequence[torch.Tensor | None]) -> None:
    """Run the backward pass of those outputs that require gradients."""
    several = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    pairs = [
        (output, grad)
        for output, grad in zip(several, grads)
        if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Return ``function(*args)`` without saving its activations; the backward pass recomputes them.

    All RNG states are those of the forward pass. With ``distribute_saved_activations`` each tensor-parallel rank keeps
    an equal part of the first argument, whose memory becomes this part.
    """
    return CheckpointFunction.apply(function, distribute_saved_activations, *args)  # type: ignore[no-untyped-call]


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], owner: CheckpointWithoutOutput, *args: Any) -> Any:
        with torch.no_grad():
            outputs = function(*args)
        ctx.arguments, ctx.owner = _Arguments(ctx, args), owner
        owner.ctx = ctx
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        inputs, outputs = ctx.owner.recomputed
        ctx.owner.recomputed = None
        _backward(outputs, grads)
        return None, None, *(arg.grad if isinstance(arg, torch.Tensor) else None for arg in inputs)


class CheckpointWithoutOutput:
    """Recomputation of a function that also frees its output until the backward pass.

    The modules after it must save the output itself, not a copy. ``fp8`` has no effect: it is for modules of
    Transformer Engine.
    """

    def __init__(self, fp8: bool = False) -> None:
        self.fp8 = fp8
        self.ctx: Any = None
        self.outputs: tuple[torch.Tensor, ...] | None = None
        self.recomputed: tuple[tuple[Any, ...], tuple[torch.Tensor, ...]] | None = None

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Return ``run_function(*args)`` without saving its activations."""
        self.run_function, self.rng_states = run_function, _get_all_rng_states()
        outputs = _WithoutOutput.apply(run_function, self, *args)  # type: ignore[no-untyped-call]
        self.outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
        """Free the outputs; the gradient of ``hook_tensor`` triggers their recomputation."""
        for output in self.outputs or ():
            output.untyped_storage().resize_(0)
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(self._recompute)  # type: ignore[no-untyped-call]

    def _recompute(self, _: torch.Tensor) -> None:
        """Run the function again and put the results into the freed outputs."""
        assert self.outputs is not None
        inputs = _detached(_recomputable(self.ctx.arguments.restore(self.ctx.saved_tensors)))
        with _fork_rng(), torch.enable_grad():
            _set_all_rng_states(*self.rng_states)
            outputs = self.run_function(*inputs)
        again = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
        for output, result in zip(self.outputs, again, strict=True):
            storage, values = output.untyped_storage(), result.detach().contiguous().untyped_storage()
            storage.resize_(values.nbytes())
            with torch.no_grad():
                storage.copy_(values)
        self.recomputed, self.outputs = (inputs, again), None
