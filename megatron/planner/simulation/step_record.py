"""What a dry run saw of one step: operations, waits, communication and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.core.process_group import CollectiveCall
from megatron.planner.simulation.gemms import Gemm

PHASES = ("begin", "batch", "forward", "backward", "reduction", "optimizer", "end")
"""The parts of a step in their order."""
PASSES = ("batch", "forward", "backward")
"""The parts that come with every micro-batch."""
HOST_DIRECTIONS = TO_HOST, TO_DEVICE = ("to the host", "to the device")


@dataclass(frozen=True)
class Operation:
    """Describe one operation that launches kernels.

    ``shapes`` and ``itemsize`` are of its tensors in their order, ``num_bytes`` what it reads and writes, ``flops``
    what it computes of a product or of attention (masked scores left out), and ``where`` the line of this project that
    asked for it; for an operation of autograd, the line whose gradient it computes. ``gemm`` are the sizes of a GEMM.
    ``is_recomputed`` says that activation recomputation runs it a second time, and ``is_uncounted`` that it may compute
    more than is known: a custom operator, a Triton program with ``tl.dot``. ``is_expert`` says that it is a GEMM of MoE
    experts.
    """

    phase: str
    name: str
    where: str
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    num_bytes: int
    flops: float = 0.0
    gemm: Gemm | None = None
    is_recomputed: bool = False
    is_uncounted: bool = False
    is_expert: bool = False


@dataclass(frozen=True)
class HostWait:
    """Describe one place in which the host waits for the device."""

    phase: str
    where: str
    what: str


@dataclass(frozen=True, eq=False)
class HostCopy:
    """Describe a copy between the device and the host: the line that asked for it, where it goes, and its bytes."""

    phase: str
    where: str
    direction: str
    num_bytes: int


@dataclass(frozen=True)
class Communication:
    """Describe one communication of a step, and whether it leaves the machine."""

    phase: str
    where: str
    call: CollectiveCall
    crosses_machines: bool


Transfer = Communication | HostCopy
"""What moves beside the kernels."""


@dataclass(frozen=True)
class LinkEvent:
    """Say that a transfer begins after so many operations, or that those that follow wait for its end."""

    phase: str
    num_operations: int
    transfer: Transfer
    is_wait: bool


@dataclass
class StepRecord:
    """Hold a step of one rank in order; ``memory`` has the bytes by holder after so many operations.

    ``link_events`` begin with what the step before has left under way, ``num_carried`` of them.
    """

    operations: list[Operation] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    host_copies: list[HostCopy] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    link_events: list[LinkEvent] = field(default_factory=list)
    num_carried: int = 0
    memory: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    peak_bytes: int = 0
    peak_holders: Mapping[str, int] = field(default_factory=dict)
    peak_phase: str = ""
