"""Initialize a rank: launch environment, CUDA variables, device, process groups and seeds.

Importing this module imports no torch, so that a wrong command line is rejected quickly.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron.config import RunConfig, machine_notes, notes_on_groups, read_nccl_options
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
    """Variables to set, and the log line with these and the variables that the user has set."""

    added: Mapping[str, str]
    line: str


def choose_cuda_settings(config: RunConfig, environment: Mapping[str, str], capability: int) -> CudaSettings:
    """Choose the CUDA variables of a run; ``capability`` is the GPUs' major compute capability."""
    wanted = {_PRIORITY: "1"}
    sizes = config.parallel_sizes
    overlaps = sizes.tp > 1 or sizes.cp > 1
    if overlaps and not config.ddp.shards_weights and capability < _BLACKWELL:
        wanted[_CONNECTIONS] = "1"
    if sizes.pp > 1:
        wanted[_P2P_WARNING] = "0"
    # NCCL allocates user buffers itself, in segments of a fixed size.
    if not environment.get(_OLD_ALLOCATOR) and not config.ddp.has_user_buffers:
        wanted[_ALLOCATOR] = "expandable_segments:True"
    names = (_CONNECTIONS, _ALLOCATOR, _OLD_ALLOCATOR, _PRIORITY, _P2P_WARNING)
    given = {name: environment[name] for name in names if environment.get(name)}
    added = {name: value for name, value in wanted.items() if name not in given}
    shown = [f"{name}={value}" for name, value in sorted(added.items())]
    shown += [f"{name}={value} (from the environment)" for name, value in sorted(given.items())]
    return CudaSettings(added, f"> CUDA settings: {', '.join(shown)}")


_OUTLIVES_ERRORS = ("0", "2")
"""Values of TORCH_NCCL_ASYNC_ERROR_HANDLING with which an NCCL error does not end the process."""
_FAILURE_TIMEOUT = timedelta(seconds=2)
_STORE_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class LaunchEnvironment:
    """Values that torchrun passes to each process, or those of a single process without a launcher.

    ``local_rank`` is None if the environment does not set it. ``local_world_size``, the number of processes on this
    node, is then 1.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int = 1


@dataclass(frozen=True)
class MeetingPoint:
    """Address of the rendezvous store, and whether the launcher or rank 0 hosts it."""

    host: str
    port: int
    is_kept_by_launcher: bool


@dataclass(frozen=True, eq=False)
class Runtime:
    """Context of this process for the rest of the run: its device, process groups and random streams.

    ``local_rank`` is the rank within the node. ``flight`` is the flight recorder of the process's collectives and of
    its position in the run.
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
        """Return whether this process does the work that one process per node should do."""
        return self.local_rank == 0


def read_launch_environment() -> LaunchEnvironment:
    """Read this process's rank, the world size and its local rank from the environment.

    Raises:
        ConfigurationError: RANK, WORLD_SIZE or LOCAL_RANK is not a valid number.
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
        "start a single process"
    )


def scheduler_job_id() -> str:
    """Return the SLURM job id, or an empty string outside of SLURM."""
    return os.environ.get("SLURM_JOB_ID", "")


def omp_num_threads() -> str:
    """Return the value of OMP_NUM_THREADS, or an empty string if it is not set."""
    return os.environ.get("OMP_NUM_THREADS", "")


def elastic_run_id() -> str:
    """Return torchrun's run id, or an empty string if torchrun did not start the process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def meeting_point() -> MeetingPoint | None:
    """Return the address of the rendezvous store, or None if the environment does not set it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if host is None or not port.isdecimal():
        return None
    return MeetingPoint(host, int(port), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def is_first_failure() -> bool:
    """Return whether this process is the first of the run to fail; a process that fails may call it once.

    A failing process makes the others fail in their collectives, and only the first traceback shows the cause. If the
    store cannot be reached, the result is True.
    """
    return _count_failures(1) <= 1


def has_run_failed() -> bool:
    return _count_failures(0) > 0


def connect_store(purpose: str = "") -> Any:
    """Open a separate connection to the rendezvous store.

    A single process has a store in its memory. With a ``purpose`` the keys are separate from those of other purposes,
    and of starts before a restart by torchrun.

    Raises:
        ConfigurationError: the store's address is not set, or it cannot be reached.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        raise ConfigurationError(
            "MASTER_ADDR and MASTER_PORT are not set to the address of the processes' store; start the processes with "
            "torchrun"
        )
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"the store at {host}:{port} cannot be reached ({reason}); see the message of the process that hosts it"
        ) from error
    if not purpose:
        return store
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megatron/{purpose}/{restart}", store)  # type: ignore[attr-defined]


def launcher_error_file() -> str:
    """Return torchrun's error file of this process, or an empty string if torchrun did not start it."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def abort_communication() -> None:
    """Abort pending NCCL operations, so that the process can end; gloo needs no abort."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        abort = getattr(dist.group.WORLD, "abort", None)
        if abort is not None:
            abort()


def _count_failures(increment: int) -> int:
    """Add to the failure count in the rendezvous store; return 0 if there is no store or it is gone."""
    if "torch.distributed" not in sys.modules:  # no process group yet, and not worth waiting for the import
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

    # The store's own timeout covers only the connection: a stopped process keeps its port open and never replies.
    asking = threading.Thread(target=ask, name="failure count", daemon=True)
    asking.start()
    asking.join(2 * _FAILURE_TIMEOUT.total_seconds())
    return answers[0] if answers else 0


def outlive_errors_of_nccl() -> None:
    """Stop torch's watchdog from ending a process that lost a peer; call this before groups are created.

    torchrun enables that watchdog in the environment of every process that it starts.
    """
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") not in _OUTLIVES_ERRORS:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


def initialize_device(launch: LaunchEnvironment) -> Device:
    """Select and initialize this process's device."""
    from megatron.core.device import select_device

    device = select_device(launch.local_rank or 0)
    device.make_current()
    device.keep_freed_memory()
    return device


def initialize_distributed(
    launch: LaunchEnvironment, device: Device, backend: str, timeout_minutes: int, store: Any = None
) -> str | None:
    """Join the process group unless the world size is 1; return a warning if the backend had to be changed.

    The ranks find each other through ``store``, by default the launcher's. A rank that has joined stays in its group.
    """
    import torch.distributed as dist

    if launch.world_size == 1 or dist.is_initialized():
        return None
    warning = None
    if backend == "nccl" and not device.is_cuda:
        backend = "gloo"
        warning = "WARNING: --distributed-backend nccl needs CUDA, which this node does not have: using gloo"
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
    """Set up device, process groups and random streams, and print Megatron's lines about them.

    The ranks find each other through ``store``, by default the launcher's.
    """
    import torch.distributed as dist

    from megatron.core.device import driver_capability

    if launch.local_rank is None:
        launch = replace(launch, local_rank=config.initialization.local_rank)
    # CUDA reads its variables when it is initialized, and selecting a device initializes it.
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
        if warning is not None and not config.logging.brief_log:
            print_line(warning)
        if device.is_cuda and settings is not None:
            print_line(settings.line)
        is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        for line in machine_notes(config, device.is_cuda, "LOCAL_RANK" in os.environ, has_nccl=is_nccl):
            print_line(line)
        if is_nccl:
            path, state = config.initialization.nccl_communicator_config_path, runtime.state
            for line in notes_on_groups(path, lambda group: getattr(state, group).size):
                print_line(line)
        if not config.logging.brief_log:
            print_line(f"> initialized tensor model parallel with size {runtime.state.tp.size}")
            print_line(f"> initialized pipeline model parallel with size {runtime.state.pp.size}")
            print_line(f"> setting random seeds to {config.initialization.seed} ...")
    return runtime


def initialize_lasting_runtime(config: RunConfig, launch: LaunchEnvironment) -> Runtime:
    """Like `initialize_runtime`, but destroy the group of all processes at the end of the program.

    A group that the caller has created is the caller's to destroy.
    """
    import torch.distributed as dist

    has_group = dist.is_initialized()
    runtime = initialize_runtime(config, launch)
    if dist.is_initialized() and not has_group:
        atexit.register(shut_down)
    return runtime


def make_runtime(config: RunConfig, device: Device, local_rank: int = 0, observer: Observer | None = None) -> Runtime:
    """Create this process's groups and random streams; the process group already exists unless the world size is 1.

    ``observer`` is called for every collective over the groups.
    """
    from megatron.core.parallel_state import create_parallel_state
    from megatron.core.tensor_parallel import RngStreams

    timeout = timedelta(minutes=config.initialization.distributed_timeout_minutes)
    flight = FlightRecorder()
    instances = config.ddp.num_distributed_optimizer_instances
    state = create_parallel_state(
        *(config.parallel_sizes, timeout, observer, config.model.cp_inner_size, flight, instances),
        nccl_options=read_nccl_options(config.initialization.nccl_communicator_config_path),
    )
    return Runtime(device, state, RngStreams(device, config.initialization.seed, state.place), local_rank, flight)


def shut_down() -> None:
    """Destroy the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
