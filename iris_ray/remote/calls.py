"""Calls of functions on the head of a cluster whose dashboard alone can be reached: both ends of such a call.

A job of Ray's job API runs this module there. The function travels as a package of Ray. Its answers come back in the
output of the job, as lines of JSON after a random word. Everybody who can write to that output can write answers, so
none is unpickled: an answer has the type that is expected of it, or is refused.
"""

import builtins
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import json
import os
import pickle
import re
import secrets
import sys
import tempfile
import time
import traceback
import zoneinfo
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import to_jsonable_python
from ray import cloudpickle

import iris_ray
from iris_ray import errors
from iris_ray.actors.calls.asking_again import try_again
from iris_ray.actors.calls.ray_internals import address_of_own_cluster
from iris_ray.actors.protocol.version import require_fit, versions_here
from iris_ray.client.connection import AUTO, connect, current_user, new_job_id
from iris_ray.errors import (
    IrisError,
    JobCancelledError,
    NoClusterError,
    RayJobError,
    RemoteUserError,
    ResultTooLargeError,
    VersionMismatchError,
)
from iris_ray.model.checks import require
from iris_ray.model.options import OPTIONS
from iris_ray.remote.ray_jobs import RayJobConfig, RayJobs, RayJobStatus
from iris_ray.settings import NOTIFY, PRIORITY, PRIORITY_REASON, TEAM, USER

MOST_ANSWER_BYTES = 32 << 20
"""Limit for an answer: Ray's dashboard has the whole output of a job in its memory whenever somebody reads it."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
SILENT = NoClusterError, RayJobError
"""The errors of a dashboard that may answer later."""
PATIENCE_S = 60.0
"""Seconds for which a dashboard may be silent after a call was sent: a tunnel breaks, a laptop sleeps."""
_VERSIONS, _CALL = "versions.json", "call.pickle"
_BEGUN, _ANSWER, _ERROR = "begun", "answer", "error"
"""The second word of a line from the head."""
_IN_JSON = ConfigDict(val_json_bytes="base64")


@dataclass(frozen=True, slots=True)
class HeadCall:
    """A call that was sent.

    Attributes:
        jobs: the jobs of the cluster.
        run_id: the id of the job that makes the call.
        word: the first word of each line of an answer.
    """

    jobs: RayJobs
    run_id: str
    word: str

    @staticmethod
    def send(
        jobs: RayJobs,
        name: str,
        function: Callable[[], Any],
        packages: Sequence[Path] = (),
        run_id: str | None = None,
        says: bool = True,
        **sent: Any,
    ) -> "HeadCall":
        """Send a call to the head of a cluster, with the variables that hold this user's name and defaults of jobs.

        Args:
            jobs: the jobs of the cluster.
            name: the name of the job, without its random part.
            function: a function of iris_ray, bound to its arguments, that returns an answer or yields several. Answers
                are plain values, and dataclasses of these.
            packages, says: as for `RayJobs.submit`.
            run_id: the id of the job; a number is added if it is taken. None: a new id from the name.
            sent: further fields of `RayJobConfig`, such as the working directory. None is sent unless one is given.

        Raises:
            NoClusterError, TokenRefusedError, RayJobError, InvalidRequestError: as for `RayJobs.submit`.
            InvalidRequestError: ``IRIS_NOTIFY`` has no valid destinations.
        """
        word = f"iris-ray-{secrets.token_hex(16)}"
        own = [f"{name}={value}" for name, value in _of_this_user().items()]
        with tempfile.TemporaryDirectory(prefix="iris-ray-") as folder:
            package = Path(folder) / word.replace("-", "_")
            package.mkdir()
            (package / "__init__.py").touch()
            (package / _VERSIONS).write_text(json.dumps(versions_here()))
            (package / _CALL).write_bytes(cloudpickle.dumps(function))
            command = ["env", *own, "python", "-m", __name__, package.name]
            config = RayJobConfig(command, **{"working_dir": None, **sent})
            run_id = run_id or new_job_id(name).rpartition("/")[2]
            return HeadCall(jobs, jobs.submit(config, run_id, [package, *packages], says, hides_env=True), word)

    def answer(self, kind: Any, number: int = 0, patience_s: float = PATIENCE_S) -> Any:
        """Wait for an answer, and return it.

        Args:
            kind: its type, as in an annotation.
            number: which of the answers, if the function yields several.
            patience_s: the time in seconds for which the dashboard may be silent without a break.

        Raises:
            VersionMismatchError: the head's iris_ray, Ray or Python is incompatible with this process's.
            ResultTooLargeError: the answer can't be sent.
            JobCancelledError, RayJobError: the job was stopped, has ended without the answer, or gave one of another
                type.
            Exception: the function's own error.
        """
        look = functools.partial(self.jobs._look, self.run_id)
        pause_s = SHORTEST_PAUSE_S
        while True:
            status, output = try_again(look, *SILENT, within_s=patience_s, pause_s=LONGEST_PAUSE_S)
            ours = (line.partition(" ")[2] for line in output.splitlines() if line.startswith(f"{self.word} "))
            answers = [line for line in ours if line != _BEGUN]
            if len(answers) > number:
                return self._read(answers[number], kind)
            if status.finished:
                raise self._lost(status, output)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def follow(self, show: Callable[[str], object]) -> None:
        """Give each line that the function prints to ``show``, until its end. An interruption ends the call.

        After a broken connection, the output continues where it stopped.
        """
        with concurrent.futures.ThreadPoolExecutor(1, "iris-ray-output") as pool:  # a notebook's thread has a loop
            try:
                pool.submit(self._follow, show).result()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the process on the head. If the dashboard does not answer, nothing happens."""
        with contextlib.suppress(IrisError):
            self.jobs.stop(self.run_id)

    def _follow(self, show: Callable[[str], object]) -> None:
        seen, failed, rest, has_begun = 0, 0, "", False
        while True:
            came = 0

            def take(piece: str) -> None:
                nonlocal came, seen, rest, has_begun
                *lines, rest = (rest + piece[max(0, seen - came) :]).split("\n")
                came += len(piece)
                seen = max(seen, came)
                for line in lines:
                    if line.startswith(f"{self.word} "):
                        has_begun = True
                    elif has_begun:  # earlier lines are Ray's
                        show(line)

            try:
                if self.jobs.follow(self.run_id, take).finished:
                    return
            except SILENT:
                failed = 0 if came else failed + 1
                if failed * LONGEST_PAUSE_S > PATIENCE_S:
                    raise
            time.sleep(LONGEST_PAUSE_S)

    def _read(self, line: str, kind: Any) -> Any:
        """Return an answer, or raise an error."""
        what, _, text = line.partition(" ")
        wanted: Any = tuple[str, str, str] if what == _ERROR else tuple[kind]
        try:
            said = TypeAdapter(wanted, config=_IN_JSON).validate_json(text)
        except ValueError as error:
            raise RayJobError(
                f"{self.run_id}, which ran on the head for this client, gave an answer that can't be read:"
                f" {' '.join(str(error).split())[:500]}"
            ) from None
        if what == _ERROR:
            raise _error(*said)
        return said[0]

    def _lost(self, status: RayJobStatus, output: str) -> Exception:
        if status.state == "stopped":
            return JobCancelledError(f"{self.run_id}, which ran on the head for this client, was stopped")
        if re.search(r"No module named '?iris_ray\b", output):
            return VersionMismatchError(
                "the cluster's image has no iris_ray, or one that takes no calls through the dashboard: build it with"
                f" iris_ray {iris_ray.__version__}, which is installed here"
            )
        last = (output.strip().splitlines() or [""])[-1][:500]
        return RayJobError(
            f"{self.run_id}, which ran on the head for this client, has ended: {status.state}: {status.message} {last}"
        )


def _of_this_user() -> dict[str, str]:
    """Return the variables that name this user, the defaults of the user's jobs and the user's time zone.

    Ray's dashboard shows them.

    Raises:
        InvalidRequestError: the destinations of notifications are not valid; an address of a webhook must not be shown.
    """
    if destinations := NOTIFY.read():
        require(NOTIFY.name, destinations.split(), OPTIONS["notify"].check)
    own = {USER: current_user(), **{one: one.read() for one in (TEAM, PRIORITY, PRIORITY_REASON, NOTIFY)}}
    return {variable.name: value for variable, value in own.items() if value} | {"TZ": time_zone()}


def time_zone() -> str:
    """Return this machine's time zone as a rule of POSIX, such as CET-1CEST,M3.5.0,M10.5.0/3.

    The head may have no data about time zones, for which a name would mean UTC. The data here end with the rule.
    """
    named = os.environ.get("TZ", "").removeprefix(":")
    if re.fullmatch(r"(<.+>|[A-Za-z]{3,})[+-]?\d[!-~]*", named):
        return named
    for file in [Path(folder, named) for folder in zoneinfo.TZPATH] if named else [Path("/etc/localtime")]:
        with contextlib.suppress(OSError, ValueError):
            rule = file.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
            if re.fullmatch(rb"[A-Za-z<][!-~]*", rule):
                return rule.decode()
    now = time.localtime()
    hours, minutes = divmod(abs(now.tm_gmtoff) // 60, 60)
    return f"<local>{'-' if now.tm_gmtoff > 0 else ''}{hours}:{minutes:02}"


def _error(name: str, message: str, trace: str) -> Exception:
    """Return an error of iris_ray or Python that was raised on the head; one of another class as its traceback."""
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    with contextlib.suppress(TypeError):  # some want more than a message
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(message)
    return RemoteUserError(trace)


# -- on the head -------------------------------------------------------------------------------------------------------


def make_call(package: str) -> None:
    """Make the call in a package, and print its answers."""
    module = importlib.import_module(package)
    directory = Path(str(module.__file__)).parent

    def say(*said: str) -> None:
        sys.stdout.write(" ".join([package.replace("_", "-"), *said]) + "\n")  # at once: others print as well
        sys.stdout.flush()

    try:
        theirs = json.loads((directory / _VERSIONS).read_text())
        require_fit(versions_here(), theirs, "the cluster's head", "build the cluster's image anew")
        function = pickle.loads((directory / _CALL).read_bytes())
        if (own := address_of_own_cluster()) is not None:
            os.environ["RAY_ADDRESS"] = own  # for this process, and the commands that it starts
        connect(os.environ.get("RAY_ADDRESS") or AUTO)
        say(_BEGUN)
        answer = function()
        for one in answer if inspect.isgenerator(answer) else [answer]:
            say(_ANSWER, _in_json(one))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        say(_ERROR, json.dumps([type(error).__name__, str(error), trace]))


def _in_json(answer: object) -> str:
    text = json.dumps([to_jsonable_python(answer, bytes_mode="base64", inf_nan_mode="constants")])
    if (size := len(text) * 3 // 4) > MOST_ANSWER_BYTES:  # most of a large one is bytes in base64
        raise ResultTooLargeError(
            f"the answer takes {size:,} bytes, and through the dashboard's port come at most"
            f" {MOST_ANSWER_BYTES:,}; have the job write it to a file or a bucket"
        )
    return text


if __name__ == "__main__":
    make_call(sys.argv[1])
