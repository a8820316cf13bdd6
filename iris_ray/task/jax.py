"""JAX on a gang: `initialize` joins all processes, and `agreed_notice` has them save the same step."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from typing import Any

import jax
from jax._src import distributed  # its client has no public name (JAX 0.10 to 0.12)
from jax.experimental import multihost_utils

from iris_ray.actors.protocol.services import call_hooks, installed_services
from iris_ray.model.job_info import JobInfo
from iris_ray.model.notices import NoticeKind
from iris_ray.task.job_info import get_job_info
from iris_ray.task.preemption import PreemptionNotice, known_notice, note_asking, preemption_notice

WAIT_FOR_TASK_0_S = 60.0
"""How long the other tasks wait for task 0 to listen. After that, JAX waits, and raises its own error."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25

NOTICE_TIMEOUT_S = 5.0
"""How long a process without a notice of its own waits for another one's after JAX has agreed on the step."""


def initialize(**kwargs: Any) -> None:
    """Join the processes of this gang into one JAX program; call it before anything else touches JAX's devices.

    On Cloud TPU, ``jax.distributed.initialize()`` finds its peers by itself, with one fixed port. This function takes
    the address that iris_ray chose for this attempt, so it can't meet a leftover of an earlier attempt or another gang
    on the host, and it works without TPUs. If the job's ``failure_domain`` is the slice, each slice is a JAX program of
    its own. Outside a task, and in a task without peers, it joins nobody, so that a script also runs on its own.

    In tasks with chips, JAX's compilation cache is then in ``local_dir``, unless ``JAX_COMPILATION_CACHE_DIR`` says
    otherwise. So the next attempt doesn't compile the same programs again on hosts that it has kept. In a gang of
    several slices, a new host first copies the cache of the host of the same number in another slice, if one of the
    three that it asks at most has one. ``JAX_ENABLE_COMPILATION_CACHE=0`` switches the cache off.

    Args:
        kwargs: passed on to ``jax.distributed.initialize``, such as ``initialization_timeout=60`` (seconds).

    Example::

        def train():
            iris_ray.jax.initialize()
            print(jax.process_index(), "of", jax.process_count())
    """
    if (me := get_job_info()) is not None:
        call_hooks((service.in_jax for service in installed_services()), me, patience_s=None)
    info = _place_among_others()
    if info is None:
        return
    if info.gang_rank:
        patience_s = min(WAIT_FOR_TASK_0_S, kwargs.get("initialization_timeout", WAIT_FOR_TASK_0_S))
        _wait_for_listener(info.coordinator_address, patience_s)
    jax.distributed.initialize(
        coordinator_address=info.coordinator_address,
        coordinator_bind_address=info.coordinator_address,  # and on no other interface
        num_processes=info.gang_size,
        process_id=info.gang_rank,
        **kwargs,
    )
    if known_notice() is not None:  # it came before JAX listened
        os.kill(os.getpid(), signal.SIGTERM)


def _place_among_others() -> JobInfo | None:
    """Return this task's place in its gang; None outside a task, and in a task without peers."""
    info = get_job_info()
    return info if info is not None and info.gang_size > 1 else None


def _wait_for_listener(address: str, timeout_s: float) -> None:
    """Wait until a process listens there. JAX itself would try again only after a second if task 0 is late."""
    host, _, port = address.rpartition(":")
    deadline, pause_s = time.monotonic() + timeout_s, SHORTEST_PAUSE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def agreed_notice(step: int) -> PreemptionNotice | None:
    """Return the gang's preemption notice, the same one at the same step in all processes; at other steps None.

    All processes must call it once in every step. JAX agrees on the step by itself, because processes get SIGTERM with
    the notice. A process whose host could not deliver the notice gets it from the others. Outside a task, and in a task
    without peers, this is `preemption_notice`.

    Args:
        step: the number of the current step, the same in all processes.

    Returns:
        The notice, at the step on which the processes have agreed; None at all other steps.

    Example::

        if notice := iris_ray.jax.agreed_notice(step):
            save(step, params)
            notice.saved()
    """
    if _place_among_others() is None:
        return preemption_notice()
    note_asking()
    if not multihost_utils.reached_preemption_sync_point(step):
        return None
    client: Any = distributed.global_state.client
    key, notice = f"iris_ray/notice/{step}", preemption_notice()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if notice is not None:
            client.key_value_set(key, json.dumps(dataclasses.astuple(notice)))  # an error if another one was faster
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return _of_text(client.blocking_key_value_get(key, int(NOTICE_TIMEOUT_S * 1000)))
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(key, "null")  # the signal came without a notice; then all do without one
    return _of_text(client.blocking_key_value_get(key, int(NOTICE_TIMEOUT_S * 1000)))


def _of_text(text: str) -> PreemptionNotice | None:
    found = json.loads(text)
    return None if found is None else PreemptionNotice(NoticeKind(found[0]), *found[1:])
