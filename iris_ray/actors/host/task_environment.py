"""The environment of a task process: its variables, those of its raylet, and free ports."""

import errno
import random
import socket
from collections.abc import Collection, Mapping, MutableMapping, Sequence

import psutil

from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MEGASCALE_PREFIX, MultisliceInfo

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
) -> dict[str, str | None]:
    """Return the changes that turn an inherited environment into a task's: name → value, or None to remove it.

    The user's variables win over our defaults. Variables that identify the task and its slice (``IRIS_*``,
    ``MEGASCALE_*``) win over the user's. On a single slice every MEGASCALE variable is removed, the user's included.

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
    """
    changes = {name: host_env.get(name) for name in _CHIP_VISIBILITY}
    if num_cpus is not None:
        changes["OMP_NUM_THREADS"] = str(max(1, int(num_cpus)))
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
    changes |= user_env

    megascale = multislice.to_env()
    for name in {*inherited, *user_env}:
        if name.startswith(MEGASCALE_PREFIX) and not (megascale and name in user_env):
            changes[name] = None  # set by a provider or an earlier attempt; a user may tune a multislice run
    return changes | megascale | info.to_env()


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


# Below Linux' default ephemeral range (32768 and up), where an outgoing connection may take a port at any moment, and
# above Ray's default worker ports (10002-19999).
PORTS = range(20_000, 32_768)
MOST_REFUSALS = 1000
"""Give up after so many ports that are in use or forbidden. This suffices even if 99 of 100 are."""


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
