"""The environment of a task process: its variables, its raylet's variables, free ports, and CPUs."""

import contextlib
import errno
import os
import random
import socket
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path

import psutil

from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MEGASCALE_PREFIX, MultisliceInfo
from iris_ray.model.tpu_processes import TpuProcess

# Read by the dynamic loader, the allocator, the interpreter, the C library's locale and time zone, Ray or gRPC before
# any of our code runs: setting them in a running process is too late.
_PROCESS_START_PREFIXES = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "LC_", "RAY_", "GRPC_")
_PROCESS_START_NAMES = frozenset({"LANG", "LANGUAGE", "TZ", "HOME", "TMPDIR"})

# JAX reads its options when it is imported (checked with 0.10.2). It reads XLA_FLAGS, and libtpu reads its own
# variables, only when the program first looks for devices.
_IMPORT_PREFIXES = ("JAX_",)

# A task without GPUs must see none. Ray sets these for a task that has some.
_GPU_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

# A task with chips gets this, unless the host or the user says otherwise. Without it, JAX runs on the CPU, and says so
# in a warning only, if libtpu is missing or broken; with it, JAX raises (checked with 0.10.2).
_ON_TPU = {"JAX_PLATFORMS": "tpu,cpu"}

# A task owns all chips that its raylet has. Ray sets these for processes that hold some of the chips, or none.
_CHIP_VISIBILITY = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")

# A task without chips gets these, as Ray's own processes do. libtpu 0.0.52 still locks the host's chips once it is
# loaded, so `_ON_CPU` keeps JAX and PyTorch/XLA from loading it.
_NO_CHIPS = {"TPU_VISIBLE_CHIPS": "", "TPU_VISIBLE_DEVICES": ""}
_ON_CPU = {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}

ON_CPU = _NO_CHIPS | _ON_CPU
"""Keeps a program on a TPU host off the chips."""


def split_by_start(user_env: Mapping[str, str], preload: Sequence[str] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """Split a user's variables into those that act only when a process starts, and the rest.

    Args:
        user_env: the variables.
        preload: modules that a process imports before it knows its task.

    Returns:
        ``(at_start, at_run)``: variables to start a process with, and variables to set in a running one.
    """
    prefixes = (*_PROCESS_START_PREFIXES, *(_IMPORT_PREFIXES if preload else ()))
    at_start = {k: v for k, v in user_env.items() if k in _PROCESS_START_NAMES or k.startswith(prefixes)}
    return at_start, {k: v for k, v in user_env.items() if k not in at_start}


def task_environment(
    inherited: Mapping[str, str],
    host_env: Mapping[str, str],
    user_env: Mapping[str, str],
    info: JobInfo,
    multislice: MultisliceInfo,
    num_cpus: float | None,
    num_gpus: float = 0.0,
    tpu_process: TpuProcess | None = None,
) -> dict[str, str | None]:
    """Return the changes that turn an inherited environment into a task's: name → value, or None to remove it.

    The user's variables win over our defaults. Variables that identify the task and its slice (``IRIS_*``,
    ``MEGASCALE_*``) win over the user's. On a single slice every MEGASCALE variable is removed, the user's included.
    Variables that tell the processes of a host apart are kept as the host or the user has set them if the task is the
    only one of its gang there. Of several tasks there, each gets its own; only their bounds may be the user's.

    Args:
        inherited: the variables that the process has now.
        host_env: the variables of its raylet. On GKE the device plugin sets there which chips the pod has. Variables
            that differ from these were set by the user's Ray job.
        user_env: the user's variables.
        info: the task's place in its gang.
        multislice: the slice's place among the gang's slices.
        num_cpus: CPUs that the task claims, for ``OMP_NUM_THREADS``; None leaves the thread count to the libraries
            (Ray sets 1 for a process that claims no CPU, on a host that the task has to itself).
        num_gpus: GPUs that the task claims.
        tpu_process: its place among the processes of its slice or part, if its host has several or it has only a part.
    """
    changes = {name: host_env.get(name) for name in _CHIP_VISIBILITY}
    if num_cpus is not None:
        changes["OMP_NUM_THREADS"] = str(max(1, int(num_cpus / info.processes_per_host)))
    elif inherited.get("OMP_NUM_THREADS") == "1":
        changes["OMP_NUM_THREADS"] = None
    if info.slice_name:
        changes |= {name: value for name, value in _ON_TPU.items() if name not in inherited}
    else:
        changes |= _NO_CHIPS
    if not num_gpus:
        changes |= dict.fromkeys(_GPU_VISIBILITY, "")
        if not info.slice_name:
            changes |= {name: v for name, v in _ON_CPU.items() if inherited.get(name) == host_env.get(name)}
    is_alone = info.num_tasks == info.num_slices and "," not in inherited.get("TPU_WORKER_HOSTNAMES", "")
    if is_alone and inherited.get("TPU_WORKER_ID", "0") != "0":
        changes["TPU_WORKER_ID"] = "0"  # GKE's webhook numbers single hosts as if they were one slice's
    if tpu_process is None:
        changes |= user_env
    else:
        own = tpu_process.to_env()
        changes |= own
        changes |= user_env
        changes |= {name: own.get(name) for name in tpu_process.decided_by_us}

    megascale = multislice.to_env()
    for name in {*inherited, *user_env}:
        if name.startswith(MEGASCALE_PREFIX) and not (megascale and name in user_env):
            changes[name] = None  # set by a provider or an earlier attempt; a user may tune a multislice run
    return changes | megascale | info.to_env()


def kept_in_memory(text: str) -> str:
    """Keep a text in a file in memory that only this account can read, and return its path.

    It goes with this process; its children can read it meanwhile.

    Raises:
        OSError: the kernel has no such memory.
    """
    file = os.memfd_create("iris-ray-secret")
    with open(file, "w", encoding="utf-8", closefd=False) as written:
        written.write(text)
    os.fchmod(file, 0o400)
    return f"/proc/{os.getpid()}/fd/{file}"


def expect_chips(environ: MutableMapping[str, str]) -> None:
    """Have JAX raise if it finds no chips, in a process that imports JAX before it knows its task."""
    for name, value in _ON_TPU.items():
        environ.setdefault(name, value)


RAYLET = "raylet"


def raylet_environment() -> dict[str, str]:
    """Return the variables of the raylet that started this process; none if no raylet did, or we may not read them."""
    try:
        above = psutil.Process().parents()  # `uv run` may stand between
        return next((each.environ() for each in above if each.name() == RAYLET), {})
    except (psutil.Error, OSError):
        return {}


# -- ports -------------------------------------------------------------------------------------------------------------

# Below Linux' default ephemeral range (32768 and up), where an outgoing connection may take a port at any moment, and
# above Ray's default worker ports (10002-19999).
PORTS = range(20_000, 32_768)
PORTS_HELD = 4
"""The number of ports that a task process holds: see `actors.pool.launch.Ports`."""
MOST_REFUSALS = 1000
"""The number of ports tried before giving up. It suffices even if 99 of 100 are in use or forbidden."""


def hold_ports(address: str, count: int, avoid: Collection[int]) -> list[socket.socket]:
    """Return sockets that are bound to unused ports of this address, and do not listen.

    Args:
        address: an IP address of this host.
        count: how many.
        avoid: ports not to use.

    Raises:
        OSError: no port of this address can be bound: it may be another host's address, or all ports are forbidden.
    """
    held: list[socket.socket] = []
    refusals = 0
    while len(held) < count:
        port = random.choice(PORTS)
        if port in avoid:
            continue
        candidate = socket.socket()
        try:
            candidate.bind((address, port))
        except OSError as error:
            candidate.close()
            refusals += 1
            only_this_port = error.errno in (errno.EADDRINUSE, errno.EACCES)  # EACCES: a rule of this host
            if not only_this_port or refusals == MOST_REFUSALS:
                for one in held:
                    one.close()
                raise
        else:
            held.append(candidate)
    return held


# -- CPUs --------------------------------------------------------------------------------------------------------------

NUMA_NODES = Path("/sys/devices/system/node")


def bind_to_cpus(info: JobInfo) -> None:
    """Bind the calling thread, and threads that it starts, to the CPUs of its share of the host's NUMA nodes.

    Do nothing if the task is the only one of its gang on the host, or the kernel does not let it.
    """
    with contextlib.suppress(OSError):
        if cpus := cpus_of(info.local_index, info.processes_per_host, os.sched_getaffinity(0)):
            os.sched_setaffinity(0, cpus)


def cpus_of(local_index: int, per_host: int, allowed: Collection[int], nodes: Path = NUMA_NODES) -> set[int]:
    """Return the CPUs for one of several processes of a host; none if it is not to be bound.

    The first half of the processes gets the first half of the NUMA nodes, and so on: libtpu numbers chips in the order
    of their PCI addresses, which ascend with the nodes. Checked on no TPU7x host yet.

    Args:
        local_index: the process's number on the host.
        per_host: how many processes the host has.
        allowed: the CPUs that the process may use now.
        nodes: where the kernel describes the NUMA nodes.
    """
    if per_host == 1:  # it costs each task several milliseconds to look
        return set()
    lists = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    with_cpus = [cpus for cpus in (_listed_cpus(path.read_text()) & {*allowed} for path in lists) if cpus]
    if len(with_cpus) < 2:
        return set()
    first = local_index * len(with_cpus) // per_host
    after = max(first + 1, (local_index + 1) * len(with_cpus) // per_host)
    return set[int]().union(*with_cpus[first:after])


def _listed_cpus(text: str) -> set[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}
