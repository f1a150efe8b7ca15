"""OptimizerConfig: optimizer, loss scaling and clipping; per-parameter overrides; size of the optimizer state.

Importing this module imports no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron.core.config_base import BELOW_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, Config, flag, idle_without
from megatron.core.parallel_config import ELEMENT_BYTES
from megatron.core.registry import find_registered, is_registered


@dataclass(frozen=True)
class GroupOverride:
    """Multipliers for parameters whose names match a pattern; None keeps the default."""

    pattern: str
    lr_mult: float | None = None
    wd_mult: float | None = None

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a parameter's global name; ``*`` matches any characters, even dots."""
        return fnmatchcase(name, self.pattern)


def parse_override(text: str) -> GroupOverride:
    """Parse ``PATTERN:lr_mult=X,wd_mult=Y``, in which one of the multipliers is optional.

    Raises:
        ValueError: the text has another format; the message says what is wrong.
    """
    pattern, colon, assignments = text.rpartition(":")
    if not pattern or not colon:
        raise ValueError("it is not a pattern and multipliers separated by a colon")
    values: dict[str, float] = {}
    for assignment in assignments.split(","):
        name, equals, number = assignment.partition("=")
        if name not in ("lr_mult", "wd_mult") or not equals:
            raise ValueError(f"{assignment!r} is neither lr_mult=NUMBER nor wd_mult=NUMBER")
        if name in values:
            raise ValueError(f"{name} is repeated")
        try:
            values[name] = float(number)
        except ValueError:
            raise ValueError(f"{number!r} of {name} is not a number") from None
        if not 0.0 <= values[name] < math.inf:
            raise ValueError(f"{name}={number} must be 0 or more")
    return GroupOverride(pattern, **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config, role="run", in_args=True, retired=("use_distributed_optimizer",)):
    """Optimizer configuration; ``params_dtype`` is the name of the model's dtype."""

    optimizer: str = flag(
        "adam",
        choices=("adam", "sgd", "hybridadam", "muon", "dist_muon", "lion"),
        not_built=("cpu_adam",),
        registry="optimizer",
    )
    """Optimizer; hybridadam (Pai-Megatron-Patch) is adam with --optimizer-cpu-offload, by default of half. muon updates
    the matrices between embeddings and output layer, --muon-scalar-optimizer the rest; dist_muon is muon, which always
    shards its work (its state with --use-distributed-optimizer). A script may register others."""
    optimizer_args: tuple[str, ...] = flag((), nargs="+", metavar="NAME=VALUE", in_args=False)
    """Arguments of a registered optimizer, such as eps=1e-6 or betas=(0.9,0.99)."""
    optimizer_cpu_offload: bool = flag(False, in_args=False)
    """Keep and update a part of the main parameters and optimizer state in host memory."""
    optimizer_offload_policy: str = flag(
        "static", choices=("static", "auto"), where=("optimizer_cpu_offload", True), in_args=False
    )
    """Part to offload: --optimizer-offload-fraction (static), or what does not fit the device (auto)."""
    optimizer_offload_fraction: float | None = flag(
        None, bounds=FRACTION, where=("optimizer_offload_policy", "static"), in_args=False
    )
    """Fraction of the main parameters and state to offload; by default 1, 0.5 with hybridadam."""
    optimizer_offload_auto_threshold: int = flag(
        2**31, bounds=NOT_NEGATIVE, where=("optimizer_offload_policy", "auto"), in_args=False
    )
    """Bytes of device memory that policy auto leaves free."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, where=("optimizer_cpu_offload", True), in_args=False)
    """Copy gradients and parameters of other buckets during a CPU update."""
    use_torch_optimizer_for_cpu_offload: bool = flag(False, where=("optimizer_cpu_offload", True), in_args=False)
    """Use torch's optimizer on the device too, never apex's."""
    pin_cpu_grads: bool = flag(
        True, negative="--no-pin-cpu-grads", where=("optimizer_cpu_offload", True), in_args=False
    )
    """Copy offloaded gradients into pinned memory. Off: copy offloaded gradients into unpinned memory,
    synchronously."""
    pin_cpu_params: bool = flag(
        True, negative="--no-pin-cpu-params", where=("optimizer_cpu_offload", True), in_args=False
    )
    """Copy updated parameters from pinned memory. Off: copy updated parameters from unpinned memory, synchronously."""
    optimizer_cuda_graph: bool = flag(False, in_args=False)
    """Replay norm, clipping and Adam's update as CUDA graphs after --cuda-graph-warmup-steps iterations."""
    use_precision_aware_optimizer: bool = flag(False, in_args=False)
    """Keep gradients, main parameters and Adam's moments in the types given; update in float32."""
    main_grads_dtype: str = flag("fp32", choices=("fp32", "bf16"), needs="use_precision_aware_optimizer", in_args=False)
    """Type of the accumulated gradients; bf16 is the same as --grad-reduce-in-bf16."""
    main_params_dtype: str = flag(
        "fp32", choices=("fp32", "fp16"), needs="use_precision_aware_optimizer", in_args=False
    )
    """Type of a bfloat16 model's main parameters; fp16 stores the 16 bits of float32 that the weights lack."""
    exp_avg_dtype: str = flag(
        "fp32", choices=("fp32", "fp16", "bf16", "fp8"), needs="use_precision_aware_optimizer", in_args=False
    )
    """Type of Adam's first moment; fp16 and fp8 with a scale per 128 elements."""
    exp_avg_sq_dtype: str = flag(
        "fp32", choices=("fp32", "fp16", "bf16", "fp8"), needs="use_precision_aware_optimizer", in_args=False
    )
    """Type of Adam's second moment; fp16 and fp8 with a scale per 128 elements; fp8 stores the root. Stochastic
    rounding for fp8, and for bf16 if --adam-beta2 is above 0.996."""
    lr: float = flag(0.0, bounds=NOT_NEGATIVE)
    """Maximum learning rate."""
    min_lr: float = flag(0.0, bounds=NOT_NEGATIVE)
    """Minimum learning rate after the warm-up."""
    decoupled_lr: float | None = flag(None, bounds=POSITIVE)
    """Maximum learning rate of word embedding and output layer; by default --lr."""
    decoupled_min_lr: float | None = flag(None, bounds=NOT_NEGATIVE, needs="decoupled_lr")
    """Minimum learning rate of word embedding and output layer; by default --min-lr."""
    weight_decay: float = flag(0.01, bounds=NOT_NEGATIVE)
    """Weight decay of the parameters with two or more dimensions."""
    param_group_overrides: tuple[str, ...] = flag((), nargs="+", metavar="PATTERN:lr_mult=X,wd_mult=Y", in_args=False)
    """Multiply learning rate and weight decay of parameters by name pattern (* for any characters); the first match
    counts."""
    clip_grad: float = flag(1.0, bounds=NOT_NEGATIVE)
    """Maximum global gradient norm; 0 disables clipping."""
    clip_grad_matrices: float = flag(0.0, bounds=NOT_NEGATIVE, in_args=False)
    """Maximum gradient norm of matrices between embeddings and output layer, before --clip-grad."""
    clip_grad_embeddings: float = flag(0.0, bounds=NOT_NEGATIVE, in_args=False)
    """Maximum gradient norm of embeddings and output layer, before --clip-grad."""
    clip_grad_vectors: float = flag(0.0, bounds=NOT_NEGATIVE, in_args=False)
    """Maximum gradient norm of biases and norm weights, before --clip-grad."""
    ema_decay: float | None = flag(None, bounds=BELOW_ONE, in_args=False)
    """Decay of an exponential moving average (EMA) of the weights in float32; evaluated too."""
    adam_beta1: float = flag(0.9, bounds=BELOW_ONE)
    """Decay of Adam's first moment."""
    adam_beta2: float = flag(0.999, bounds=BELOW_ONE)
    """Decay of Adam's second moment."""
    adam_eps: float = flag(1e-8, bounds=POSITIVE)
    """Epsilon added to the square root of Adam's second moment."""
    sgd_momentum: float = flag(0.9, bounds=NOT_NEGATIVE, idle=idle_without("optimizer", value="sgd"))
    """Momentum of SGD."""
    lion_beta1: float = flag(0.95, bounds=BELOW_ONE, in_args=False)
    """Weight of the momentum in Lion's update, before the sign."""
    lion_beta2: float = flag(0.98, bounds=BELOW_ONE, in_args=False)
    """Decay of Lion's momentum."""
    muon_momentum: float = flag(0.95, bounds=BELOW_ONE, where=("optimizer", "muon"), in_args=False)
    """Momentum of Muon."""
    muon_nesterov: bool = flag(False, where=("optimizer", "muon"), in_args=False)
    """Use Nesterov momentum in Muon."""
    muon_num_ns_steps: int = flag(5, bounds=POSITIVE, where=("optimizer", "muon"), in_args=False)
    """Newton-Schulz iterations per update."""
    muon_coefficient_type: str = flag(
        "quintic",
        choices=("simple", "quintic"),
        not_built=("polar_express", "aol", "custom"),
        where=("optimizer", "muon"),
        in_args=False,
    )
    """Newton-Schulz coefficients: the same in each iteration (simple), or not (quintic)."""
    muon_scale_mode: str = flag(
        "spectral",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        where=("optimizer", "muon"),
        in_args=False,
    )
    """Scale of updates, square root of: larger side (spectral), rows / columns (unit_rms_norm), the same but at least 1
    (shape_scaling)."""
    muon_extra_scale_factor: float = flag(1.0, bounds=POSITIVE, where=("optimizer", "muon"), in_args=False)
    """Extra scale of updates; 0.2 with spectral matches AdamW's learning rate and weight decay."""
    muon_fp32_matmul_prec: str = flag(
        "medium", choices=("low", "medium", "high", "highest"), where=("optimizer", "muon"), in_args=False
    )
    """Type of the Newton-Schulz matmuls: bfloat16 (low, medium) or float32 (high, highest)."""
    muon_split_qkv: bool = flag(True, negative="--muon-no-split-qkv", where=("optimizer", "muon"), in_args=False)
    """Orthogonalize query, key and value separately. Off: orthogonalize query, key and value as one matrix. Gate and up
    are always separate."""
    muon_scalar_optimizer: str = flag("adam", choices=("adam", "lion"), where=("optimizer", "muon"), in_args=False)
    """Optimizer of embeddings, output layer, norms and biases."""
    log_num_zeros_in_grad: bool = flag(False, in_args=False)
    """Log the number of zeros in the gradients."""
    loss_scale: float | None = flag(None, bounds=POSITIVE, idle=idle_without("fp16"))
    """Constant loss scale for float16; by default the scale is dynamic."""
    initial_loss_scale: float = flag(2.0**32, bounds=POSITIVE, idle=idle_without("fp16"))
    """Initial dynamic loss scale."""
    min_loss_scale: float = flag(1.0, bounds=POSITIVE, idle=idle_without("fp16"))
    """Minimum dynamic loss scale."""
    loss_scale_window: int = flag(1000, bounds=POSITIVE, idle=idle_without("fp16"))
    """Iterations without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = flag(2, bounds=POSITIVE, idle=idle_without("fp16"))
    """Number of overflows after which the dynamic loss scale is halved."""
    max_consecutive_skipped_iterations: int = flag(100, bounds=NOT_NEGATIVE, in_args=False)
    """Maximum consecutive iterations skipped for non-finite gradients; 0 for no limit. float16 at the minimum loss
    scale, or non-finite weights, end the run at once."""
    params_dtype: str = flag("float32", cli=False, in_args=False)
    """Type of the model's parameters: float32, bfloat16, float16 or float64 (follows the model)."""

    def __post_init__(self) -> None:
        """Resolve aliases of optimizers."""
        if self.optimizer == "dist_muon":
            object.__setattr__(self, "optimizer", "muon")
        if self.optimizer == "hybridadam":
            object.__setattr__(self, "optimizer", "adam")
            object.__setattr__(self, "optimizer_cpu_offload", True)
            if self.optimizer_offload_fraction is None and self.optimizer_offload_policy == "static":
                object.__setattr__(self, "optimizer_offload_fraction", 0.5)

    @property
    def clips_by_kind(self) -> bool:
        """Return whether matrices, embeddings or vectors have a separate maximum gradient norm."""
        return any((self.clip_grad_matrices, self.clip_grad_embeddings, self.clip_grad_vectors))

    @property
    def elementwise(self) -> str:
        """Return the optimizer of all parameters, or, with Muon, of those that Muon does not update."""
        return self.muon_scalar_optimizer if self.optimizer == "muon" else self.optimizer

    @property
    def offload_fraction(self) -> float:
        """Return the offloaded fraction of the parameters; with policy auto it is set once the device is known."""
        if not self.optimizer_cpu_offload:
            return 0.0
        return 1.0 if self.optimizer_offload_fraction is None else self.optimizer_offload_fraction


def parse_optimizer_args(words: tuple[str, ...]) -> dict[str, Any]:
    """Parse the words of ``--optimizer-args`` as keyword arguments with plain Python values.

    Raises:
        ValueError: a word has another format; the message says what is wrong.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name.isidentifier() or not equals:
            raise ValueError(f"{word} is not NAME=VALUE")
        if name in ("params", "lr", "weight_decay"):
            raise ValueError(f"{name} is set by the run (--lr, --weight-decay)")
        if name in values:
            raise ValueError(f"{name} is repeated")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def state_bytes(optimizer: OptimizerConfig, *, is_matrix: bool = False) -> int:
    """Return the bytes per parameter on the device besides weight and gradient: main parameter and moments.

    ``is_matrix`` is true for weights between the embeddings and the output layer, for which Muon keeps only one moment.
    """
    sizes = _sizes(optimizer)
    has_main_copy = ELEMENT_BYTES[optimizer.params_dtype] < sizes["fp32"]
    main_copy = sizes[optimizer.main_params_dtype] if has_main_copy else 0
    return main_copy + _average_bytes(optimizer) + _moment_bytes(optimizer, is_matrix=is_matrix)


def host_state_bytes(optimizer: OptimizerConfig, num_elements: int) -> int:
    """Return the host memory in bytes for the offloaded part of ``num_elements`` parameters, main copies included."""
    of_each = _sizes(optimizer)["fp32"] + _average_bytes(optimizer) + _moment_bytes(optimizer)
    return math.ceil(optimizer.offload_fraction * num_elements) * of_each


def _average_bytes(optimizer: OptimizerConfig) -> int:
    return 0 if optimizer.ema_decay is None else _sizes(optimizer)["fp32"]


def _moment_bytes(optimizer: OptimizerConfig, *, is_matrix: bool = False) -> int:
    sizes = _sizes(optimizer)
    if is_registered("optimizer", optimizer.optimizer):
        return _registered_bytes(optimizer.optimizer, optimizer.optimizer_args) * sizes["fp32"] // 4
    if optimizer.elementwise == "lion" or (optimizer.optimizer == "muon" and is_matrix):
        return sizes["fp32"]
    if optimizer.elementwise == "sgd":
        return sizes["fp32"] if optimizer.sgd_momentum else 0
    return sizes[optimizer.exp_avg_dtype] + sizes[optimizer.exp_avg_sq_dtype]


@functools.cache
def _registered_bytes(name: str, words: tuple[str, ...]) -> int:
    """Return the bytes of float32 state per parameter of a registered optimizer."""
    count: Callable[[tuple[str, ...]], int] = find_registered("optimizer", name).properties["state_bytes"]
    return count(words)


def _sizes(optimizer: OptimizerConfig) -> dict[str, int]:
    """Return the bytes per element of each state dtype; a float64 model has float64 state."""
    return {"fp32": max(4, ELEMENT_BYTES[optimizer.params_dtype]), "fp16": 2, "bf16": 2, "fp8": 1}
