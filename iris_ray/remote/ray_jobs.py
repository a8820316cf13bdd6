"""Ray's job API: run a script on a cluster from a machine that is not in it, such as a laptop."""

import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iris_ray.actors.protocol.services import module_of
from iris_ray.client.connection import new_job_id, without_ray_address
from iris_ray.client.remote_options import read_env_file, require_env_travels
from iris_ray.errors import (
    InvalidRequestError,
    IrisError,
    NoClusterError,
    RayJobError,
    TokenRefusedError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.model.checks import VARIABLES, require, shown, texts
from iris_ray.terminal import live_line


@dataclass(frozen=True, slots=True)
class RayJobConfig:
    """A command to run on a Ray cluster, in a directory that is sent there. It is checked before anything is sent.

    Args:
        command: the program and its arguments, such as ``["python", "train.py", "--steps", "1000"]``. No shell reads
            them: spaces, quotes and ``$`` arrive as they are.
        working_dir: the directory that is sent to the cluster, and in which the command runs; or a zip file of it,
            which is sent as it is; None: none.
        excludes: patterns of files that are not sent, as in a .gitignore file. Files that its .gitignore and
            .rayignore name are not sent either.
        with_secrets: send files that look like secrets, such as ``.env`` and ``*.pem``; else they stay here. A line
            names them.
        env: environment variables of the command and of all that it starts on Ray. Ray shows them in its dashboard and
            its logs.
        env_file: a file with further variables, ``NAME=value`` a line, for secrets. The command and the tasks of its
            jobs get them, and other processes of Ray don't. Ray shows none of them, except, in its logs on the hosts,
            those that act when a task's process starts, such as ``PYTHON…``.
        pip: packages to install on the cluster for it.

    Raises:
        InvalidRequestError: a field can't work as written.
    """

    command: Sequence[str]
    working_dir: str | Path | None = "."
    excludes: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    env_file: str | Path | None = None
    pip: Sequence[str] = ()
    with_secrets: bool = False

    def __post_init__(self) -> None:
        for name, example in (("command", '["python", "train.py"]'), ("excludes", '["data/"]'), ("pip", '["chex"]')):
            require(name, getattr(self, name), texts(example))
        if not self.command or not self.command[0]:
            raise InvalidRequestError(
                'command is empty; give a program and its arguments, such as ["python", "train.py"]'
            )
        if self.working_dir is not None and not (self._is_packed or Path(self.working_dir).is_dir()):
            raise InvalidRequestError(f"working_dir is {str(self.working_dir)!r}, which is not a directory")
        require("env", self.env, VARIABLES)
        require_env_travels(self.variables())

    @property
    def name(self) -> str:
        """The job's name: its script, or its program."""
        scripts = [part for part in self.command if part.endswith(".py")]
        stem = Path((scripts or [self.command[0]])[0]).stem
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem) or "job"

    @property
    def entrypoint(self) -> str:
        """The command, quoted for the shell on the cluster."""
        return shlex.join(self.command)

    @property
    def _is_packed(self) -> bool:
        """Whether the directory is a zip file."""
        path = Path(self.working_dir or "")
        return path.suffix == ".zip" and path.is_file()

    def variables(self) -> dict[str, str]:
        """Return all variables; those of ``env`` win over those of the file."""
        return (read_env_file(self.env_file) if self.env_file is not None else {}) | dict(self.env)


_CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging")
"""Loggers of Ray that tell each step."""
PROBE_S = 5.0
"""The limit for the dashboard's answer to the first request; seconds."""
MOST_NAMES = 1_000
"""The limit for suffixes that are tried for a name that is taken."""
OUR_JOB = re.compile(r"^iris_ray: job (.+)$", re.MULTILINE)
"""The line by which a script names each job that it submits; see `start_request`."""
_TRY = "give the dashboard's URL, such as http://10.0.0.2:8265"


@dataclass(frozen=True, slots=True)
class RayJobStatus:
    """The status of a job of Ray's job API.

    Attributes:
        run_id: its id.
        state: ``pending``, ``running``, ``stopped``, ``succeeded`` or ``failed``.
        message: Ray's message about it.
        job_ids: the jobs that its script has submitted with the ``run_on_pod`` family so far.
        exit_code: of its command, once that has ended; None if Ray does not know it.
    """

    run_id: str
    state: str
    message: str
    job_ids: tuple[str, ...]
    exit_code: int | None = None

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("stopped", "succeeded", "failed")


def submit_tpu_job_on_ray(config: RayJobConfig, ray_address: str, run_id: str | None = None) -> str:
    """Submit a job to a Ray cluster from a machine outside of it, and leave it to the cluster.

    Args:
        config: the command to run.
        ray_address: the URL of the cluster's dashboard, such as ``http://10.0.0.2:8265``.
        run_id: the id for the job; a number is added if it is taken. None: a new name.

    Returns:
        The job's id, by which `RayJobs` follows and stops it.

    Raises:
        InvalidRequestError: something can't work as written, such as a directory that is too large; nothing was sent.
        NoClusterError: no dashboard answers there.
        TokenRefusedError: the cluster wants a token, or another one.
        VersionMismatchError: the minor version of the cluster's Ray differs from that of the Ray installed here.
        RayJobError: the cluster refuses the job, or gives an answer that Ray's client can't read.

    Example::

        run_id = submit_tpu_job_on_ray(RayJobConfig(["python", "train.py"]), "http://10.0.0.2:8265")
    """
    if not isinstance(config, RayJobConfig):
        raise InvalidRequestError(f"config is a {type(config).__name__}; give RayJobConfig(command=[…], …)")
    return RayJobs(ray_address).submit(config, run_id)


class RayJobs:
    """The jobs of a cluster, through Ray's job API.

    Args:
        ray_address: the URL of the cluster's dashboard.

    Raises:
        InvalidRequestError, NoClusterError, TokenRefusedError, VersionMismatchError, RayJobError: as for
            `submit_tpu_job_on_ray`.
    """

    def __init__(self, ray_address: str) -> None:
        self._address = _dashboard_url(ray_address)
        _require_dashboard(self._address)
        from ray.job_submission import JobSubmissionClient

        with self._answers(), without_ray_address():
            self._client = JobSubmissionClient(self._address)
        for name in _CHATTY:  # each sets its own level when it is imported
            logging.getLogger(name).setLevel(logging.WARNING)

    def submit(
        self,
        config: RayJobConfig,
        run_id: str | None = None,
        packages: Sequence[Path] = (),
        says: bool = True,
        hides_env: bool = False,
    ) -> str:
        """Send the job's directory and submit the job; arguments, result and errors as of `submit_tpu_job_on_ray`.

        ``packages`` are directories of Python packages that are sent as well; the job can import them. ``says``: print
        a line about the directory. ``hides_env``: send the variables of ``env`` like those of a file.
        """
        wanted = new_job_id(config.name).rpartition("/")[2] if run_id is None else _checked(run_id)
        chosen = self._free_name(wanted)  # asks first, before anything is sent: the cluster may refuse the token
        what = "the job"
        runtime_env: dict[str, Any] = {"env_vars": {} if hides_env else dict(config.env)}
        if config.pip:
            runtime_env["pip"] = list(config.pip)
        if packages:
            runtime_env["py_modules"] = [str(package) for package in packages]
        if config.working_dir is not None:
            what, excludes = ("the job", []) if config._is_packed else _say_what_is_sent(config, says)
            runtime_env |= {"working_dir": str(config.working_dir), "excludes": excludes}
        hidden = {name: value for name, value in config.variables().items() if hides_env or name not in config.env}
        with self._sent(hidden) as prefix:
            entrypoint = " ".join(filter(None, (shlex.join(prefix), config.entrypoint)))
            while True:
                try:
                    with self._answers(), live_line(f"sending to {self._address}") as line:
                        line.show(what)
                        submitted: str = self._client.submit_job(
                            entrypoint=entrypoint, runtime_env=runtime_env, submission_id=chosen
                        )
                        return submitted
                except RayJobError as error:
                    if "already exists" not in str(error):
                        raise
                    chosen = self._free_name(wanted)  # another job has taken the name meanwhile

    @contextlib.contextmanager
    def _sent(self, variables: Mapping[str, str]) -> Iterator[list[str]]:
        """Send variables for a command, and yield the words before the command.

        If the block fails, the variables are overwritten: no command comes that would delete them.
        """
        from iris_ray.actors.calls.ray_internals import send_package

        if not variables:
            yield []
            return
        uri = f"gcs://iris-ray-{secrets.token_hex(16)}.zip"
        with self._answers():
            send_package(self._client, uri, json.dumps(variables).encode())
        try:
            yield ["python", "-m", "iris_ray.remote.variables", uri]
        except BaseException:
            with contextlib.suppress(IrisError), self._answers():
                send_package(self._client, uri, b"")
            raise

    def status(self, run_id: str) -> RayJobStatus:
        """Return the status of a job.

        Raises:
            UnknownNameError: there is no such job.
            NoClusterError, TokenRefusedError, RayJobError: as for `submit_tpu_job_on_ray`.
        """
        return self._look(run_id)[0]

    def _look(self, run_id: str) -> tuple[RayJobStatus, str]:
        """Return the status of a job and its output, which is complete if the job has ended. Raises like `status`."""
        with self._answers(run_id):
            details = self._client.get_job_info(_checked(run_id))
            output = str(self._client.get_job_logs(run_id))
        code: int | None = details.driver_exit_code
        ours = tuple(dict.fromkeys(OUR_JOB.findall(output)))
        return RayJobStatus(run_id, str(details.status).lower(), details.message or "", ours, code), output

    def logs(self, run_id: str) -> str:
        """Return the output of a job. Raises like `status`."""
        with self._answers(run_id):
            return str(self._client.get_job_logs(_checked(run_id)))

    def stop(self, run_id: str) -> bool:
        """Stop a job and all that it has started except detached jobs; return whether it ran. Raises like `status`."""
        with self._answers(run_id):
            return bool(self._client.stop_job(_checked(run_id)))

    def follow(self, run_id: str, show: Callable[[str], object]) -> RayJobStatus:
        """Give the output of a job to ``show`` until the job is over; return its status then.

        Raises like `status`, and InvalidRequestError in a thread whose event loop runs, as in a notebook.
        """
        import asyncio

        async def copy() -> None:
            pieces: AsyncIterator[str] = self._client.tail_job_logs(run_id)
            while True:
                with self._answers(run_id):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                show(piece)

        with contextlib.suppress(RuntimeError):  # no event loop runs here
            asyncio.get_running_loop()
            raise InvalidRequestError(
                "follow would stop the event loop that runs in this thread, as one does in a notebook; have another"
                " thread wait: await asyncio.to_thread(jobs.follow, run_id, print)"
            )
        self.status(run_id)  # raises if the job is unknown
        asyncio.run(copy())
        return self.status(run_id)

    @property
    def _access(self) -> tuple[str, dict[str, Any]]:
        """The URL of the dashboard, and the arguments of an `aiohttp.ClientSession` that it serves."""
        from iris_ray.actors.calls.ray_internals import http_access

        return self._address, http_access(self._client)

    def _free_name(self, wanted: str) -> str:
        for number in range(MOST_NAMES):
            name = f"{wanted}-{number}" if number else wanted
            try:
                with self._answers(name):
                    self._client.get_job_info(name)
            except UnknownNameError:
                return name
        raise InvalidRequestError(f"{MOST_NAMES} jobs are called {wanted}-…; choose another run_id")

    @contextlib.contextmanager
    def _answers(self, run_id: str = "") -> Iterator[None]:
        """Turn an error of Ray's client into an error of iris_ray."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise TokenRefusedError(_about_tokens(self._address, str(error))) from None
        except IrisError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # Ray's client takes any JSON for an answer
            why = " ".join(str(error).split())[:500]
            raise RayJobError(
                f"the cluster at {self._address} gave an answer that Ray's client can't read ({type(error).__name__}:"
                f" {why}); see that this is the dashboard's address, and that nothing between changes its answers"
            ) from None
        except (requests.RequestException, ConnectionError) as error:
            raise NoClusterError(
                f"the dashboard at {self._address} does not answer ({type(error).__name__}); is the cluster"
                " up, and is this the dashboard's address? Its port is usually 8265"
            ) from None
        except RuntimeError as error:  # Ray raises it for everything else
            if "does not exist" in str(error):
                raise UnknownNameError(
                    f"the cluster at {self._address} has no job {run_id!r} of Ray's API; for a job of the cluster's"
                    f" queue: iris-ray job status {run_id} --address {self._address}, or IrisClient.remote"
                ) from None
            why = (str(error).strip().splitlines() or [""])[-1]  # the last line of a traceback is the error
            raise RayJobError(f"the cluster at {self._address} refused: {why[:500]}") from None


def _dashboard_url(address: str) -> str:
    if not isinstance(address, str):
        raise InvalidRequestError(f"the address is {address!r}; {_TRY}")
    if re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
        return address.rstrip("/")
    if re.fullmatch(r"[^/\s:]+:\d+", address):
        return f"http://{address}"
    raise InvalidRequestError(f"the address is {address!r}, and Ray's job API needs a URL; {_TRY}")


def _require_dashboard(address: str) -> None:
    """Ask for Ray's version, and require this one's. There is a deadline: Ray's own client would wait for minutes."""
    import ray
    import requests

    try:
        answer = requests.get(f"{address}/api/version", timeout=PROBE_S)
        found = answer.json() if answer.status_code == 200 else None
    except requests.exceptions.JSONDecodeError:
        found = None
    except requests.RequestException as error:
        why = "no answer in time" if isinstance(error, requests.Timeout) else "no connection"
        raise NoClusterError(
            f"nothing answers at {address} ({why}); {_TRY}, and see that this machine can reach it, for example through"
            " `ssh -L 8265:localhost:8265 HEAD`"
        ) from None
    if answer.status_code in (401, 403):
        return  # the first request of the client shows whether its token is good
    if not isinstance(found, dict) or not isinstance(found.get("ray_version"), str):
        came = f"status {answer.status_code}, {shown(answer.text[:100])}"
        raise NoClusterError(f"the server at {address} is not the dashboard of a Ray cluster ({came}); {_TRY}")
    theirs = found["ray_version"]
    if theirs.split(".")[:2] != ray.__version__.split(".")[:2]:
        raise VersionMismatchError(
            f"the cluster at {address} runs Ray {theirs}, and Ray {ray.__version__} is installed here, which does not"
            f" understand it: pip install 'ray[default]=={theirs}' here, or build the cluster's image with"
            f" {ray.__version__}"
        )


def _about_tokens(address: str, refusal: str) -> str:
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return (
            f"the cluster at {address} wants a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with"
            " the token (or keep it in ~/.ray/auth_token)"
        )
    missing = "required" in refusal.partition("\n")[0]
    what = "got no token" if missing else "refuses this token"
    return f"the cluster at {address} {what}; see RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token here"


def _checked(run_id: str) -> str:
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", run_id):
        raise InvalidRequestError(
            f"run_id is {run_id!r}; give up to 100 letters, digits, dots, hyphens and underscores"
        )
    return run_id


def _say_what_is_sent(config: RayJobConfig, says: bool) -> tuple[str, list[str]]:
    """Return the size of the directory, before it is sent, and patterns of excluded files; print it if it ``says``.

    Raises:
        InvalidRequestError: the directory is larger than Ray allows.
        ServiceUnavailableError: the service of development, which recognises secrets, was taken out.
    """
    from iris_ray.actors.calls.ray_internals import MOST_PACKAGE_BYTES, walk_package

    code = module_of("dev", "code_directory")

    directory = Path(str(config.working_dir)).absolute()
    files = total = 0
    largest, most = directory, 0
    looks_secret: list[str] = []
    stays: list[str] = []
    variables = None if config.env_file is None else os.path.realpath(config.env_file)

    def add(path: Path) -> None:
        nonlocal files, total, largest, most
        if not path.is_file():
            return
        name = str(path.relative_to(directory))
        if variables is not None and os.path.realpath(path) == variables:
            stays.append(name)
            return
        if code.looks_secret(name):
            looks_secret.append(name)
            if not config.with_secrets:
                stays.append(name)
                return
        size = path.stat().st_size
        files, total = files + 1, total + size
        if size > most:
            largest, most = path, size
        if total > MOST_PACKAGE_BYTES:
            raise InvalidRequestError(
                f"working_dir {directory} holds more than {_in_words(MOST_PACKAGE_BYTES)}, which is Ray's limit; the"
                f" largest file so far is {largest} ({_in_words(most)}). Name what the job does not need in excludes,"
                " or in .rayignore"
            )

    walk_package(directory, list(config.excludes), add)
    what = f"{directory}: {files} file{'s' * (files != 1)}, {_in_words(total)}"
    if says:
        print(f"iris_ray: sending {what}", file=sys.stderr)
    if looks_secret and says:
        print(f"iris_ray: {code.secrets_in_words(looks_secret, config.with_secrets)}", file=sys.stderr)
    return what, [*config.excludes, *map(_pattern_of, stays)]


def _pattern_of(name: str) -> str:
    """Return the pattern, as in a .gitignore file, of the one file of this path."""
    return "/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", name)


def _in_words(size: int) -> str:
    return f"{size:,} bytes" if size < 10_000 else f"{size / 2**20:,.1f} MiB"
