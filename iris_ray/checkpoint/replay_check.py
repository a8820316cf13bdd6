"""Silent corruption: all devices of a gang run one step on the same bytes, and the results are compared bit by bit."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from iris_ray.errors import InvalidRequestError
from iris_ray.task.job_info import get_job_info

RUNS = 2
"""The number of runs on each device. A device with two results is at fault; this needs no majority."""
DIGEST_BYTES = 16
NAME_BYTES = 128
NAMED = 4


@dataclass(frozen=True, slots=True)
class ReplaySuspect:
    """A device that is at fault: its result differs from that of most others, or its two runs differ.

    Attributes:
        host: its host: slice and worker, or the machine's name if it isn't part of a slice.
        process: its process, as JAX counts.
        device: its number in that process.
        why: which leaves differ, in words.
    """

    host: str
    process: int
    device: int
    why: str

    def __str__(self) -> str:
        return f"{self.host} (process {self.process}, device {self.device}): {self.why}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of `replay_check`, equal in all processes.

    Attributes:
        replicas: the number of devices.
        suspects: the devices that are at fault.
        unclear: the names of the leaves that differ without a majority for one result.
    """

    replicas: int
    suspects: tuple[ReplaySuspect, ...] = ()
    unclear: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all devices have the same bytes in both runs."""
        return not self.suspects and not self.unclear

    def __str__(self) -> str:
        if self.agrees:
            return f"{self.replicas} devices agree in every bit"
        unclear = f"no majority agrees on {_listed(self.unclear)}" if self.unclear else ""
        return "; ".join(filter(None, (*map(str, self.suspects), unclear)))


def replay_check(step_fn: Callable[..., Any], state: Any, *batch: Any) -> ReplayReport:
    """Have every device of the gang run one step on the same bytes, and compare the results bit by bit.

    A device whose result differs from that of most is at fault, and so is one whose second run differs from its first.
    The states of the processes are compared as well, which shows a replica that diverged earlier. All processes must
    call this at the same step. It takes two steps and a compilation; each device needs memory for another copy of the
    state and for the result.

    Args:
        step_fn: called as ``step_fn(state, *batch)`` on one device; returns a pytree of arrays. It may be jitted. It
            must be deterministic, and call no collective operation.
        state: a pytree of arrays that each process holds whole: replicated, or on the host. It is not changed.
        batch: further arguments; those of process 0 count.

    Raises:
        InvalidRequestError: an array is spread over processes.

    Example::

        if step % 10_000 == 0:
            report = iris_ray.jax.replay_check(train_step, state, batch)
            if not report.agrees:
                raise RuntimeError(f"silent corruption: {report}")
    """
    given = state, *batch
    state = jax.tree.map(_whole, state)
    common = multihost_utils.broadcast_one_to_all(jax.tree.map(_whole, batch))
    arguments = jax.tree.map(_as_given, given, (state, *common))
    results = [_run(step_fn, arguments) for _ in range(RUNS)]
    names = [*(f"state{name}" for name in _names(state)), *(f"result{name}" for name in _names(results[0][0]))]
    devices = jax.local_device_count()
    mine = np.stack([[_digests((state, run[at])) for run in results] for at in range(devices)])
    digests = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, RUNS, len(names), DIGEST_BYTES)
    host = np.frombuffer(_this_host().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), np.uint8)
    hosts = np.asarray(multihost_utils.process_allgather(host), np.uint8).reshape(-1, NAME_BYTES)
    return compared(digests, names, [each.tobytes().rstrip(b"\0").decode(errors="replace") for each in hosts])


def compared(digests: np.ndarray, names: list[str], hosts: list[str]) -> ReplayReport:
    """Return the report that follows from digests.

    Args:
        digests: by device, run, leaf and byte; the devices of each process follow one another.
        names: of the leaves.
        hosts: the names of the processes' hosts.
    """
    said = [[[leaf.tobytes() for leaf in run] for run in device] for device in digests]
    wrong: dict[int, list[str]] = {}
    unclear = []
    for leaf, name in enumerate(names):
        fickle = {at for at, runs in enumerate(said) if len({run[leaf] for run in runs}) > 1}
        steady = {at: runs[0][leaf] for at, runs in enumerate(said) if at not in fickle}
        usual, count = Counter(steady.values()).most_common(1)[0] if steady else (b"", 0)
        odd = {at for at, value in steady.items() if value != usual}
        if odd and 2 * count <= len(steady):
            unclear.append(name)
            odd = set()
        for at in sorted(fickle):
            wrong.setdefault(at, []).append(f"{name} differs from run to run")
        for at in sorted(odd):
            wrong.setdefault(at, []).append(f"{name} differs from {count} of {len(steady)}")
    per_process = len(said) // len(hosts)
    suspects = (
        ReplaySuspect(hosts[at // per_process], at // per_process, at % per_process, _listed(tuple(facts)))
        for at, facts in sorted(wrong.items())
    )
    return ReplayReport(len(said), tuple(suspects), tuple(unclear))


def _run(step_fn: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """Return the results of all devices of this process. They run side by side."""
    step = jax.jit(step_fn)
    on_devices = [step(*jax.device_put(arguments, device)) for device in jax.local_devices()]
    return [jax.tree.map(_whole, result) for result in on_devices]


def _whole(leaf: Any) -> np.ndarray:
    """Return an array on the host."""
    if isinstance(leaf, jax.Array):
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_replicated:
            leaf = leaf.addressable_data(0)
        elif not leaf.is_fully_addressable:
            raise InvalidRequestError(
                f"an array of shape {leaf.shape} is spread over processes; replay_check compares arrays that each"
                " process holds whole: give replicated ones, or a small state for this check"
            )
    return np.asarray(leaf)


def _as_given(given: Any, whole: np.ndarray) -> Any:
    """Return an array of the kind that was given: bytes of a random key become a key again."""
    if not _is_key(given):
        return whole
    return jax.random.wrap_key_data(jax.numpy.asarray(whole), impl=jax.random.key_impl(given))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _digests(tree: Any) -> np.ndarray:
    return np.stack([np.frombuffer(digest, np.uint8) for digest in map(_digest, jax.tree.leaves(tree))])


def _digest(leaf: np.ndarray) -> bytes:
    kind = f"{leaf.dtype} {leaf.shape} ".encode()
    return blake2b(kind + np.ascontiguousarray(leaf).tobytes(), digest_size=DIGEST_BYTES).digest()


def _names(tree: Any) -> Iterator[str]:
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path)


def _this_host() -> str:
    me = get_job_info()
    return f"{me.slice_name} worker {me.worker_id}" if me is not None and me.slice_name else socket.gethostname()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
