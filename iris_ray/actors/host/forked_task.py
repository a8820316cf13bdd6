"""A task's process as a fork of the zygote: what it and its TPUHostActor say to each other over a socket of its own.

Only the host's side pickles. What a task's process says is JSON and bytes, so that user code can't have the host run
anything.
"""

import json
import math
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from iris_ray.actors.calls.clocks import Moment
from iris_ray.actors.calls.ray_internals import ClusterToJoin, has_joined, join_when_needed, name_process
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.host.user_code import flush_output, raised, run_exit_handlers
from iris_ray.actors.protocol.messages import ProcessReady, TaskLaunch
from iris_ray.framing import Connection, ConnectionLost, Frame
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.processes.identity import ProcessIdentity

BEGIN, LAUNCH, EXIT = b"b", b"l", b"x"
"""The kinds of frames from the host: how to wait, the rest of what to run, and to end."""
READY, END = b"r", b"e"
"""The kinds of frames from the task's process: it waits; the rest of its end."""
PIECE = b"p"
"""The kind of a frame with a piece of a payload. All pieces come before the rest."""
PIECE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Begin:
    """What a fork needs to wait for its task.

    Args:
        address: the host's IP address.
        avoid_ports: ports that earlier attempts used.
        directory: the host's.
        raylet: the variables of the host's raylet.
        cluster: the Ray cluster that the task joins if it needs Ray.
    """

    address: str
    avoid_ports: frozenset[int]
    directory: Path
    raylet: dict[str, str]
    cluster: ClusterToJoin


# -- the task's process ------------------------------------------------------------------------------------------------


def run_forked(own_end: socket.socket) -> None:
    """Be a task's process: wait, run one task, tell how it ended, and end. Never return."""
    host, code = Connection(own_end), 1
    try:
        _run(host)
        code = 0
    except ConnectionLost:  # the host's actor is gone; nobody waits for this task any more
        pass
    except SystemExit as stop:  # by a signal's handler, before or after user code
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        os._exit(code & 0xFF)


def _run(host: Connection) -> None:
    begin: Begin = pickle.loads(_expect(host, BEGIN))
    for stream in (sys.stdout, sys.stderr):  # as in Ray's workers: each line is seen at once
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    try:
        process = TaskProcess(begin.address, begin.avoid_ports, (), lambda: begin.directory, begin.raylet)
        join_when_needed(begin.cluster)
        name_process("iris_ray::task")
        ready = process.ready()
    except Exception as error:
        problem = f"a task's process can't start: {type(error).__name__}: {error}"
        ready = ProcessReady(*ProcessIdentity.of_this_process(), "", (), problem)
    host.send(Frame(READY, data=json.dumps(ready).encode()))
    launch = _launch(host)
    name_process(f"iris_ray::task {launch.label}")
    try:
        end = process.run(launch)
    except Exception as error:  # not of user code: such as a variable that can't be set
        end = raised(error)
    for frame in end_in_frames(replace(end, never_joined=not has_joined())):
        host.send(frame)
    _expect(host, EXIT)
    run_exit_handlers()
    flush_output()


def _launch(host: Connection) -> TaskLaunch:
    function = bytearray()
    while (frame := host.receive()).kind == PIECE:
        function += frame.data
    launch: TaskLaunch = pickle.loads(frame.data)
    return replace(launch, pickled_function=bytes(function))


def _expect(host: Connection, kind: bytes) -> bytes:
    frame = host.receive()
    if frame.kind != kind:
        raise ConnectionLost(f"a frame of kind {frame.kind!r} came in place of {kind!r}")
    return frame.data


# -- frames ----------------------------------------------------------------------------------------------------


def in_pieces(payload: bytes) -> Iterator[Frame]:
    """Yield the frames of a pickled function, result or exception; they may be longer than a frame can be."""
    for start in range(0, len(payload), PIECE_BYTES):
        yield Frame(PIECE, data=payload[start : start + PIECE_BYTES])


def launch_in_frames(launch: TaskLaunch, function: bytes) -> Iterator[Frame]:
    """Yield the frames that start a task."""
    yield from in_pieces(function)
    yield Frame(LAUNCH, data=pickle.dumps(replace(launch, pickled_function=b"")))


def end_in_frames(end: TaskEnd) -> Iterator[Frame]:
    """Yield the frames that tell how a task ended."""
    yield from in_pieces(end.payload or b"")
    facts = [end.kind.value, float(end.ended_at), end.payload is not None, end.error, end.traceback, end.exit_code]
    yield Frame(END, data=json.dumps([*facts, end.never_joined]).encode())


def end_of(frame: Frame, payload: bytes) -> TaskEnd:
    """Return the end that a task's process has told.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        kind, at, has_payload, error, traceback, exit_code, never_joined = json.loads(frame.data)
        if not math.isfinite(at) or (kind == EndKind.RETURNED.value and not has_payload):
            raise ValueError("an end without a time, or a return without a result")
        return TaskEnd(
            EndKind(kind),
            Moment(at),
            payload if has_payload else None,
            str(error),
            str(traceback),
            None if exit_code is None else int(exit_code),
            never_joined is True,
        )
    except (TypeError, OverflowError, RecursionError) as problem:
        raise ValueError(str(problem)) from problem
