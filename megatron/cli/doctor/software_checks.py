"""Checks of installed packages, compiled extensions, and environment variables of NCCL, CUDA and torch."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from megatron.cli.doctor.host_checks import Finding

_IMPORT_TIMEOUT_S = 120.0
_OPTIONAL: Mapping[str, tuple[str, str]] = {
    "triton": ("triton", "fused kernels"),
    "flash_attn": ("flash-attn", "attention"),
    "apex": ("apex", "the fused optimizer"),
    "transformer_engine": ("transformer-engine", "attention and norms with --transformer-impl transformer_engine"),
    "deep_ep": ("deep_ep", "expert parallelism with --moe-token-dispatcher-type flex"),
}
"""Optional packages by module name: the name of the distribution and the use of the package."""
_EXTENSIONS: Mapping[str, str] = {
    "megatron.core.datasets._helpers": "data set indices are built with NumPy, about ten times slower",
    "megatron.core.datasets._bus_error": "a data file that is truncated while it is read ends a run without a message",
    "megatron.data._json_lines": "preprocessing parses JSON in Python, several times slower",
}


def examine_software(try_import: Callable[[str], str | None] | None = None) -> Iterator[Finding]:
    """Yield findings on versions and imports; ``try_import`` returns the reason of a failed import, or None."""
    fails = try_import or why_not_importable
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    reason = fails("torch")
    if reason is not None:
        yield Finding(
            "wrong", "torch", f"cannot be imported: {reason}", "install it again: bash requirements/install.sh"
        )
    else:
        yield Finding("ok", "torch", importlib.metadata.version("torch"))
    for module, (distribution, use) in _OPTIONAL.items():
        yield _examine_package(module, distribution, use, fails)
    for module, loss in _EXTENSIONS.items():
        if importlib.util.find_spec(module) is None:
            remedy = "pip install --no-build-isolation --no-deps -e ."
            yield Finding("warning", module, f"not built: {loss}", remedy)
        elif (reason := fails(module)) is not None:
            remedy = "build it with this Python: pip install --no-build-isolation --no-deps -e ."
            yield Finding("wrong", module, f"cannot be imported: {reason}", remedy)
        else:
            yield Finding("ok", module, "compiled")


def why_not_importable(module: str) -> str | None:
    """Import a module in a new process and return the last line of its error, or None if the import succeeds.

    An extension that was built for another torch may crash the process that imports it.
    """
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the import did not end within {_IMPORT_TIMEOUT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else lines[-1] if lines else f"the process ended with {done.returncode}"


def _examine_package(module: str, distribution: str, use: str, fails: Callable[[str], str | None]) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding("ok", module, f"not installed: it is optional, for {use}")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    reason = fails(module)
    if reason is not None:
        remedy = f"build it for this torch, or pip uninstall {distribution}"
        return Finding("warning", module, f"{version} cannot be imported: {reason}", remedy)
    return Finding("ok", module, f"{version}, for {use}")


_NCCL_WORDS = """
ALGO ALLOC_P2P_NET_LL_BUFFERS ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE
CHECK_POINTERS COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE
CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DESYNC_DEBUG
DMABUF_ENABLE ENV_PLUGIN GRAPH_DUMP_FILE GRAPH_FILE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING
IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA
IB_MERGE_NICS IB_MERGE_VFS IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS
IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P LAUNCH_MODE
LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LL128_BUFFSIZE LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS
MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID
MNNVL_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NCHANNELS_PER_PEER NET NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH
NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS
NVB_DISABLE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE
P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL P2P_USE_CUDA_MEMCPY PROFILER_PLUGIN PROTO PXN_C2C
PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RUNTIME_CONNECT SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE
SHM_LOCALITY SHM_USE_CUDA_MEMCPY SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME
SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC TOPO_DUMP_FILE TOPO_FILE
TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD USE_COMM_NONBLOCKING VERSION WIN_ENABLE
WORK_FIFO_BYTES
"""
NCCL_VARIABLES = frozenset(f"NCCL_{word}" for word in _NCCL_WORDS.split())
"""Variables of NCCL, variables of torch that start with ``NCCL_``, and NCCL_VERSION, which container images set."""
_SPELLING_CUTOFF = 0.85
_LAST_WITH_ONE_CONNECTION = 10

_SLOW: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "the GPUs of a node then communicate through host memory instead of NVLink",
    "NCCL_SHM_DISABLE": "processes of one node without peer access then communicate over the network",
    "NCCL_IB_DISABLE": "nodes then communicate over plain sockets",
    "CUDA_LAUNCH_BLOCKING": "the host then waits for every kernel",
    "TORCH_NCCL_BLOCKING_WAIT": "the host then waits for every collective",
    "NCCL_BLOCKING_WAIT": "the host then waits for every collective",
    "NCCL_CHECKS_DISABLE": "NCCL then does not report which argument was wrong",
}


def examine_environment(
    environment: Mapping[str, str], local_processes: int, num_cores: int, capability: tuple[int, int] | None
) -> Iterator[Finding]:
    """Yield findings on environment variables; ``capability`` is the GPUs' compute capability, None without GPU."""
    yield from _examine_spelling(environment)
    for name, consequence in _SLOW.items():
        if environment.get(name, "0") not in ("", "0"):
            yield Finding("warning", name, f"{environment[name]}: {consequence}", f"unset {name} unless it is intended")
    level = environment.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE"):
        yield Finding(
            "warning", "NCCL_DEBUG", f"{level} prints many lines per process", "set NCCL_DEBUG=WARN once the run works"
        )
    yield _examine_threads(environment, local_processes, num_cores)
    if capability is None:
        return
    if environment.get("MEGATRON_DEVICE") == "cpu":
        yield Finding("warning", "MEGATRON_DEVICE", "cpu: the GPUs are not used", "unset MEGATRON_DEVICE")
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if capability[0] < _LAST_WITH_ONE_CONNECTION and connections not in (None, "", "1"):
        yield Finding(
            "warning",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            f"{connections}: before Blackwell a kernel may start before the communication that is meant to "
            "overlap with it",
            "unset it: a run sets CUDA_DEVICE_MAX_CONNECTIONS=1 if it helps",
        )


def _examine_spelling(environment: Mapping[str, str]) -> Iterator[Finding]:
    given = sorted(name for name in environment if name.startswith("NCCL"))
    strange = []
    for name in given:
        close = [] if name in NCCL_VARIABLES else difflib.get_close_matches(name, NCCL_VARIABLES, 1, _SPELLING_CUTOFF)
        if close:
            yield Finding("warning", name, "NCCL has no such variable", f"use {close[0]} if that is intended")
        elif name not in NCCL_VARIABLES:
            strange.append(name)
    text = f"{len(given)} variables" + (f"; unknown, perhaps of a plugin: {', '.join(strange)}" if strange else "")
    yield Finding("ok", "NCCL_*", text)


def _examine_threads(environment: Mapping[str, str], local_processes: int, num_cores: int) -> Finding:
    text = environment.get("OMP_NUM_THREADS", "")
    if not text.isdecimal():
        return Finding("ok", "OMP_NUM_THREADS", "unset: a CPU run uses its share of the idle cores, torchrun sets 1")
    too_many = int(text) * local_processes > num_cores
    return Finding(
        "warning" if too_many else "ok",
        "OMP_NUM_THREADS",
        f"{text} threads for {local_processes} processes on {num_cores} cores",
        f"set OMP_NUM_THREADS={max(1, num_cores // local_processes)}" if too_many else "",
    )
