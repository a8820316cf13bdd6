"""JAX's persistent compilation cache in ``local_dir``: an attempt compiles nothing that one before it has compiled.

JAX expects one directory that all hosts share, and writes it from process 0 alone. Here each host has its own, in
memory: so each process writes, and a host that is new to the gang copies the cache of a host in another slice.
"""

import logging
import os
import warnings
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import jax

from iris_ray.actors.protocol.task_files import write_whole
from iris_ray.checkpoint.peer_files import peers
from iris_ray.errors import PeerFilesError
from iris_ray.model.job_info import JobInfo

logger = logging.getLogger(__name__)
config: Any = jax.config  # its options have no types

DIRECTORY = "jax_cache"
MOST_ASKED = 3
"""The number of other hosts that a new one asks at most. If none of them has the cache, this process compiles."""
_DEFAULTS: dict[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # 1 s by default, which leaves most programs out
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # those of GPUs put the directory's path into every key
}


def use_compilation_cache(info: JobInfo) -> None:
    """Have JAX keep what it compiles in the task's ``local_dir``, unless the user has chosen a directory, or none.

    ``JAX_ENABLE_COMPILATION_CACHE=0`` switches it off. Call it before JAX compiles anything.
    """
    if not info.local_dir or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    directory = Path(info.local_dir) / DIRECTORY / str(info.local_index)
    if info.attempt > 1 and not directory.exists():
        _copy_from_another_slice(info)
    for name, value in _DEFAULTS.items():
        if name.upper() not in os.environ:
            config.update(name, value)
    try:
        _write_in_every_process()
        _have_one_key_for_all_processes()
    except (ImportError, AttributeError) as error:  # private parts of JAX
        warnings.warn(f"this JAX fills the compilation cache in {directory} in process 0 alone: {error}", stacklevel=2)
    config.update("jax_compilation_cache_dir", str(directory))


def _copy_from_another_slice(info: JobInfo) -> None:
    """Copy the cache of the task of equal place in another slice. Any failure only costs the compilation."""
    if not info.in_gang:
        return  # it knows no host of another slice
    per_slice, hosts = info.num_tasks // info.num_slices, peers()
    others = range(info.task_index + per_slice, info.task_index + info.num_tasks, per_slice)
    for index in others[:MOST_ASKED] if hosts else ():
        host = hosts[index % info.num_tasks]
        try:
            found = host.list(f"{DIRECTORY}/{info.local_index}")
            for path, size in found.items():
                content = bytearray(size)
                host.read(path, memoryview(content))
                copy = Path(info.local_dir) / path
                copy.parent.mkdir(parents=True, exist_ok=True)
                write_whole(copy, bytes(content))
            if found:
                return
        except (PeerFilesError, OSError) as error:
            logger.warning("no copy of JAX's compilation cache: %s", error)


def _write_in_every_process() -> None:
    """Have JAX's own function that writes the cache take every process for process 0, in all versions of JAX."""
    from jax._src import compiler

    private: Any = compiler
    write = private._cache_write
    as_process_0 = {"distributed": SimpleNamespace(global_state=SimpleNamespace(process_id=0))}
    write_here = FunctionType(write.__code__, write.__globals__ | as_process_0, write.__name__, write.__defaults__)

    def write_if_possible(*args: Any, **kwargs: Any) -> None:
        try:
            write_here(*args, **kwargs)
        except Exception as error:  # a cache must not end a program
            warnings.warn(f"JAX's compilation cache could not be written: {error}", stacklevel=2)

    private._cache_write = write_if_possible


def _have_one_key_for_all_processes() -> None:
    """Leave the CPU's topology out of the keys: JAX (0.10 to 0.11) describes it differently in each process."""
    from jax._src import cache_key

    private: Any = cache_key
    add, add_kinds = private._hash_accelerator_config, private._hash_devices

    def add_unless_cpu(hash_obj: Any, devices: Any, *rest: Any) -> None:
        if devices.flat[0].platform == "cpu":
            add_kinds(hash_obj, devices)
        else:
            add(hash_obj, devices, *rest)

    private._hash_accelerator_config = add_unless_cpu
