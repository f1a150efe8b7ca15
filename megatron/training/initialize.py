"""Initialize a rank: launch environment, CUDA variables, device, process groups and seeds.

Importing this module imports no torch, so that a wrong command line is rejected quickly.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron.config import RunConfig, machine_notes
from megatron.core.console import print_line
from megatron.core.errors import ConfigurationError
from megatron.core.flight_recorder import FlightRecorder

if TYPE_CHECKING:
    from megatron.core.device import Device
    from megatron.core.parallel_state import ParallelState
    from megatron.core.process_group import Observer
    from megatron.core.tensor_parallel import RngStreams


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
_P2P_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_BLACKWELL = 10


@dataclass(frozen=True)
class CudaSettings:
    """The variables to set, and the log line with these and with the variables that the user has set."""

    added: Mapping[str, str]
    line: str


def choose_cuda_settings(config: RunConfig, environment: Mapping[str, str], capability: int) -> CudaSettings:
    """Return the settings of a run; ``capability`` is the GPUs' major compute capability."""
    wanted = {_PRIORITY: "1"}
    sizes = config.parallel_sizes
    overlaps = sizes.tp > 1 or sizes.cp > 1
    if overlaps and not config.ddp.shards_weights and capability < _BLACKWELL:
        wanted[_CONNECTIONS] = "1"
    if sizes.pp > 1:
        wanted[_P2P_WARNING] = "0"
    if not environment.get(_OLD_ALLOCATOR):
        wanted[_ALLOCATOR] = "expandable_segments:True"
    names = (_CONNECTIONS, _ALLOCATOR, _OLD_ALLOCATOR, _PRIORITY, _P2P_WARNING)
    given = {name: environment[name] for name in names if environment.get(name)}
    added = {name: value for name, value in wanted.items() if name not in given}
    shown = [f"{name}={value}" for name, value in sorted(added.items())]
    shown += [f"{name}={value} (from the environment)" for name, value in sorted(given.items())]
    return CudaSettings(added, f"> CUDA settings: {', '.join(shown)}")


_OUTLIVES_ERRORS = ("0", "2")
"""Values of TORCH_NCCL_ASYNC_ERROR_HANDLING with which an error of NCCL does not end the process."""
_FAILURE_TIMEOUT = timedelta(seconds=2)
_STORE_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class LaunchEnvironment:
    """Hold what torchrun tells each process; one process on its own where there is no launcher.

    ``local_rank`` is None where nothing in the environment says it; ``local_world_size``, the number of processes of
    this machine, is then 1.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int = 1


@dataclass(frozen=True)
class MeetingPoint:
    """Say where the store is that the processes meet at, and whether the launcher keeps it or rank 0 is to."""

    host: str
    port: int
    is_kept_by_launcher: bool


@dataclass(frozen=True, eq=False)
class Runtime:
    """Hold what the rest of the run is given of this process: its device, its groups and its random streams.

    ``local_rank`` counts the processes of this machine. ``flight`` records what the process communicates over its
    groups, and where in the run it is.
    """

    device: Device
    state: ParallelState
    rng: RngStreams
    local_rank: int = 0
    flight: FlightRecorder = field(default_factory=FlightRecorder)

    @property
    def is_reporter(self) -> bool:
        return self.state.rank == 0

    @property
    def is_first_on_machine(self) -> bool:
        """Return whether this process does for its machine what one process should do alone."""
        return self.local_rank == 0


def read_launch_environment() -> LaunchEnvironment:
    """Return this process's rank, the world size and its rank on this machine.

    Raises:
        ConfigurationError: RANK, WORLD_SIZE or LOCAL_RANK is not a number that it can be.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if name in os.environ}
    wrong = [f"{name} is {text!r}" for name, text in given.items() if not text.isdecimal()]
    if not wrong:
        rank, world_size = int(given.get("RANK", "0")), int(given.get("WORLD_SIZE", "1"))
        if rank < world_size:
            local_rank = int(given["LOCAL_RANK"]) if "LOCAL_RANK" in given else None
            local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
            return LaunchEnvironment(
                rank, world_size, local_rank, int(local_world_size) if local_world_size.isdecimal() else 1
            )
        wrong = [f"RANK is {rank} and WORLD_SIZE is {world_size}"]
    raise ConfigurationError(
        f"{', '.join(wrong)} in the environment; start the processes with torchrun, or unset {', '.join(given)} to "
        "start one"
    )


def scheduler_job_id() -> str:
    """Return the number that SLURM gave the job; empty where there is none."""
    return os.environ.get("SLURM_JOB_ID", "")


def elastic_run_id() -> str:
    """Return the number that torchrun gave the run; empty where another launcher started the process, or none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def meeting_point() -> MeetingPoint | None:
    """Return where the processes meet, None where nothing says it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if host is None or not port.isdecimal():
        return None
    return MeetingPoint(host, int(port), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def is_first_failure() -> bool:
    """Return whether no other process of this run has failed before this one; to be asked once by each that fails.

    A process that fails makes the others fail in their collectives, and only the first one's traceback says why.
    Where there is nobody to ask, the answer is yes.
    """
    return _count_failures(1) <= 1


def has_run_failed() -> bool:
    return _count_failures(0) > 0


def connect_store() -> Any:
    """Return a connection of its own to the store that the processes met at.

    A process on its own has a store in its memory.

    Raises:
        ConfigurationError: nothing says where the store is, or it cannot be reached.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        raise ConfigurationError(
            "MASTER_ADDR and MASTER_PORT do not say where the store of the processes is; start them with torchrun"
        )
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"the store at {host}:{port} cannot be reached ({reason}); see the message of the process that keeps it"
        ) from error


def launcher_error_file() -> str:
    """Return where torchrun reads why this process failed; empty where it did not start it."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def abort_communication() -> None:
    """Give up what NCCL has under way, so that the process can end; gloo needs no such thing."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        abort = getattr(dist.group.WORLD, "abort", None)
        if abort is not None:
            abort()


def _count_failures(increment: int) -> int:
    """Add to the count in the store that the processes met at; 0 where there is none, or it is gone."""
    if "torch.distributed" not in sys.modules:  # not met yet, and no reason to wait for the import
        return 0
    import torch.distributed as dist

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not dist.is_initialized() or dist.get_world_size() == 1 or host is None or port is None:
        return 0
    key = f"megatron/failures/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    answers: list[int] = []

    def ask() -> None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, wait_for_workers=False, timeout=_FAILURE_TIMEOUT
            )
            answers.append(int(store.add(key, increment)))
        except RuntimeError:
            answers.append(0)

    # The store's own limit is for the connection: a process that is stopped keeps its port open and never answers.
    asking = threading.Thread(target=ask, name="failure count", daemon=True)
    asking.start()
    asking.join(2 * _FAILURE_TIMEOUT.total_seconds())
    return answers[0] if answers else 0


def outlive_errors_of_nccl() -> None:
    """Let a process go on that has lost a peer: torch's own watchdog would end it; to be called before groups are made.

    torchrun asks for that end in the environment of every process that it starts.
    """
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") not in _OUTLIVES_ERRORS:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


def initialize_device(launch: LaunchEnvironment) -> Device:
    """Choose and occupy this process's device."""
    from megatron.core.device import select_device

    device = select_device(launch.local_rank or 0)
    device.make_current()
    return device


def initialize_distributed(
    launch: LaunchEnvironment, device: Device, backend: str, timeout_minutes: int, store: Any = None
) -> str | None:
    """Join the process group unless this process is alone; return a warning where the backend had to be changed.

    The ranks find each other through ``store``, by default that of the launcher.
    """
    import torch.distributed as dist

    if launch.world_size == 1:
        return None
    warning = None
    if backend == "nccl" and not device.is_cuda:
        backend = "gloo"
        warning = "WARNING: --distributed-backend nccl needs CUDA, which this machine does not have: using gloo"
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=device.torch_device if backend == "nccl" else None,
    )
    return warning


def initialize_runtime(config: RunConfig, launch: LaunchEnvironment, store: Any = None) -> Runtime:
    """Set up device, process groups and random streams, and say so as Megatron does.

    The ranks find each other through ``store``, by default that of the launcher.
    """
    from megatron.core.device import driver_capability

    if launch.local_rank is None:
        launch = replace(launch, local_rank=config.initialization.local_rank)
    # CUDA reads its variables when it starts, and choosing a device starts it.
    capability = driver_capability()
    settings = None if capability is None else choose_cuda_settings(config, os.environ, capability)
    if settings is not None:
        os.environ.update(settings.added)
    device = initialize_device(launch)
    if config.restart.inprocess_restart:
        outlive_errors_of_nccl()
    warning = initialize_distributed(
        launch,
        device,
        config.initialization.distributed_backend,
        config.initialization.distributed_timeout_minutes,
        store,
    )
    if config.initialization.deterministic_mode:
        device.make_deterministic()
    if config.initialization.disable_bf16_reduced_precision_matmul:
        device.keep_float32_sums()
    runtime = make_runtime(config, device, launch.local_rank or 0)
    if runtime.is_reporter:
        if warning is not None:
            print_line(warning)
        if device.is_cuda and settings is not None:
            print_line(settings.line)
        for line in machine_notes(config, device.is_cuda, "LOCAL_RANK" in os.environ):
            print_line(line)
        print_line(f"> initialized tensor model parallel with size {runtime.state.tp.size}")
        print_line(f"> initialized pipeline model parallel with size {runtime.state.pp.size}")
        print_line(f"> setting random seeds to {config.initialization.seed} ...")
    return runtime


def make_runtime(config: RunConfig, device: Device, local_rank: int = 0, observer: Observer | None = None) -> Runtime:
    """Create this process's groups and random streams; the process group exists already unless it is alone.

    ``observer`` is told of every communication over the groups.
    """
    from megatron.core.parallel_state import create_parallel_state
    from megatron.core.tensor_parallel import RngStreams

    timeout = timedelta(minutes=config.initialization.distributed_timeout_minutes)
    flight = FlightRecorder()
    instances = config.ddp.num_distributed_optimizer_instances
    state = create_parallel_state(
        config.parallel_sizes, timeout, observer, config.model.cp_inner_size, flight, instances
    )
    return Runtime(device, state, RngStreams(device, config.initialization.seed, state.place), local_rank, flight)


def shut_down() -> None:
    """Leave the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
