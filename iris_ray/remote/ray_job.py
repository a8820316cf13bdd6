"""Jobs of Ray's job API on the command line: ``submit --ray-job``, and other commands with a dashboard's address."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from iris_ray.cli.address import address_for_ray_jobs, dashboard_address
from iris_ray.cli.conventions import FAILED, INTERRUPTED, confirm, on_a_terminal, really_cancel, say_error
from iris_ray.cli.options import typed
from iris_ray.cli.printing import one_line, print_facts, print_json, print_output
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import unknown
from iris_ray.settings import TEAM, USER

if TYPE_CHECKING:  # imported when it is used: `iris-ray --help` is to be quick
    from iris_ray.remote.ray_jobs import RayJobs, RayJobStatus

OWN = ("run_id", "excludes", "env_file")
"""Options of ``submit`` that only a job of Ray's job API takes."""
SHARED = ("address", "target", "arguments", "ray_job", "env", "working_dir", "follow", "as_json")
_STAYS_HERE = {"--address": 1, "--working-dir": 1, "--exclude": 1, "--env-file": 1, "--run-id": 1, "--json": 0}
"""Options of ``submit`` that the cluster's ``submit`` does not get, and how many words follow each."""
_JOB_ID = re.compile(r'"job_id": "([^"]+)"')


def require_fitting_options(ray_job: bool) -> None:
    """Refuse given options that have no effect on this kind of job.

    Args:
        ray_job: whether it runs the script itself.

    Raises:
        InvalidRequestError: the first of them.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if not ray_job and name in OWN and dashboard_address() is None:
            raise InvalidRequestError(f"{parameter.opts[0]} is for --ray-job, and for the address of a dashboard")
        if ray_job and name not in (*OWN, *SHARED):
            raise InvalidRequestError(
                f"{parameter.opts[0]} is not for --ray-job: the script says it itself, where it calls run_on_pod"
            )


@dataclass(frozen=True, slots=True)
class Sending:
    """The flags of ``submit`` that say what travels with a command by Ray's job API.

    Attributes:
        directory: is sent, and the command runs in it.
        excludes, env, env_file: as in `RayJobConfig`.
        run_id: of the job; None: Ray chooses one.
        with_secrets: as in `RayJobConfig`.
    """

    directory: Path
    excludes: Sequence[str]
    env: Mapping[str, str]
    env_file: str | None
    run_id: str | None
    with_secrets: bool

    def submit(self, command: Sequence[str]) -> tuple["RayJobs", str]:
        """Send the directory and a command to the cluster. Return its jobs, and the id of the new one."""
        from iris_ray.remote.ray_jobs import RayJobConfig

        config = RayJobConfig(
            command,
            self.directory,
            list(self.excludes),
            dict(self.env),
            self.env_file,
            with_secrets=self.with_secrets,
        )
        jobs = _jobs(address_for_ray_jobs())
        return jobs, jobs.submit(config, self.run_id)

    def submit_without_data(self, command: Sequence[str]) -> tuple["RayJobs", str]:
        """Do as `submit`, but send what would travel from a node of the cluster, and tell which code that is."""
        from iris_ray.remote.ray_jobs import RayJobConfig

        with sent_directory(self.directory, self.with_secrets) as (directory, packages):
            config = RayJobConfig(
                command, directory, list(self.excludes), dict(self.env), self.env_file, with_secrets=self.with_secrets
            )
            jobs = _jobs(address_for_ray_jobs())
            return jobs, jobs.submit(config, self.run_id, packages, says=self.with_secrets)


@contextlib.contextmanager
def sent_directory(path: Path, whole: bool) -> Iterator[tuple[Path, list[Path]]]:
    """Say what is sent of a directory, and yield what Ray is to send: the directory, and packages beside it.

    Args:
        path: of the directory.
        whole: whether the user has named it, so that all of it travels.

    Raises:
        InvalidRequestError: it is too large.
    """
    from iris_ray.dev.checkout import Checkout, record_package
    from iris_ray.dev.code_directory import CodeDirectory

    path = path.absolute()
    checkout: Checkout | None = None
    with contextlib.suppress(InvalidRequestError) if whole else contextlib.nullcontext():
        checkout = Checkout.of(path)
    with record_package(None if checkout is None else checkout.record) as packages:
        if whole:
            yield path, packages
            return
        code = CodeDirectory.look(path) if checkout is None else checkout.code
        what = path if checkout is None else checkout.record
        click.echo(f"iris-ray: sending {what}: {code.in_words()}", err=True)
        with code.copied() as copy:
            yield copy, packages


def submit_ray_job(target: str, arguments: Sequence[str], sending: Sending, follow: bool, as_json: bool) -> None:
    """Send a directory and a command to a cluster; print the job's id."""
    jobs, submitted = sending.submit([*_program(target, sending.directory), *arguments])
    _print_id("run_id", submitted, as_json)
    if follow:
        follow_ray_job(jobs, submitted)


def submit_through_dashboard(target: str, sending: Sending, follow: bool, as_json: bool) -> None:
    """Send a directory to a cluster, and have ``iris-ray submit`` run there as it was typed; print the job's id.

    That job needs no driver. The job of Ray's job API only submits it.
    """
    from iris_ray.client.connection import current_user
    from iris_ray.errors import RayJobError

    there = _program(target, sending.directory)[-1]
    words = [there if word == target else word for word in words_for_the_cluster(typed())]
    team = TEAM.read()
    own = [f"{USER.name}={current_user()}", *([f"{TEAM.name}={team}"] if team else [])]
    command = ["env", *own, "python", "-m", "iris_ray", "submit"]
    jobs, submitted = sending.submit_without_data([*command, *(() if follow else ("--json",)), *words])
    if follow:
        follow_ray_job(jobs, submitted)
        return
    printed: list[str] = []
    status = jobs.follow(submitted, printed.append)
    found = _JOB_ID.search("".join(printed))
    if found is None:
        last = ("".join(printed).strip().splitlines() or [status.message])[-1]
        raise RayJobError(f"the cluster did not take the job: {one_line(last.removeprefix('iris-ray: '))}")
    _print_id("job_id", found[1], as_json)


def _print_id(name: str, value: str, as_json: bool) -> None:
    if as_json:
        print_json({name: value})
    else:
        click.echo(value)


def words_for_the_cluster(words: Sequence[str]) -> list[str]:
    """Return the typed words without the options that only concern the way to the cluster."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if word == "--":
            return [*kept, word, *rest]
        if name not in _STAYS_HERE:
            kept.append(word)
        elif not equals:
            for _ in range(_STAYS_HERE[name]):
                next(rest, None)
    return kept


def run_through_dashboard(
    address: str,
    words: Sequence[str],
    working_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
    packages: Sequence[Path] = (),
) -> NoReturn:
    """Have a command of ``iris-ray`` run on the cluster; print what it prints, and end with its exit code.

    Args:
        address: of the dashboard.
        words: the command.
        working_dir: the directory in which it runs.
        env: what ``--env`` has passed on: where the command runs, these variables are not set.
        packages: as for `RayJobs.submit`.
    """
    from iris_ray.client.connection import current_user
    from iris_ray.remote.ray_jobs import RayJobConfig

    jobs = _jobs(address)
    command = ["env", f"{USER.name}={current_user()}", "python", "-m", "iris_ray", *words]
    run_id = jobs.submit(RayJobConfig(command, working_dir, env=env or {}), None, packages, says=False)
    try:
        status = jobs.follow(run_id, lambda piece: print_output(piece.encode(errors="backslashreplace")))
    except BaseException:  # Ctrl-C above all
        jobs.stop(run_id)
        raise
    raise click.exceptions.Exit(FAILED if status.exit_code is None else status.exit_code)


def run_directory_through_dashboard(
    address: str, command: str, target: str, env: Mapping[str, str], named: str | None
) -> NoReturn:
    """Send a directory to a cluster, and have a command run in it there as it was typed, until its end.

    Args:
        address: of the dashboard.
        command: such as "run".
        target: the word of the command that is a script of the directory.
        env: as for `run_through_dashboard`.
        named: the directory that the user has named; None: what travels of the current one.
    """
    path = Path(named or ".")
    there = _program(target, path)[-1]
    words = [there if word == target else word for word in words_for_the_cluster(typed())]
    with sent_directory(path, named is not None) as (directory, packages):
        run_through_dashboard(address, [command, *words], directory, env, packages)


def follow_ray_job(jobs: "RayJobs", run_id: str) -> None:
    """Print what a job prints until its end. End the command if it did not succeed, or at Ctrl-C."""
    try:
        status = jobs.follow(run_id, lambda piece: print_output(piece.encode(errors="backslashreplace")))
    except KeyboardInterrupt:
        _interrupted(jobs, run_id)
    if status.state != "succeeded":
        say_error(f"{run_id} has ended: {status.state}: {one_line(status.message)}")
        raise click.exceptions.Exit(FAILED)


def show_ray_job_logs(address: str, run_id: str, follow: bool) -> None:
    """Print what a job has printed, or prints until its end."""
    jobs = _jobs(address)
    if follow:
        follow_ray_job(jobs, run_id)
    else:
        print_output(jobs.logs(run_id).encode(errors="backslashreplace"))


def show_ray_job_status(address: str, run_id: str, as_json: bool) -> None:
    """Print how a job stands, with the jobs that its script has submitted."""
    found = _jobs(address).status(run_id)
    if as_json:
        print_json(found)
    else:
        print_facts(_facts(found))


def stop_ray_job(address: str, run_id: str, yes: bool, as_json: bool) -> None:
    """End a job, and all that it has started."""
    jobs = _jobs(address)
    before = jobs.status(run_id)
    stopped = False
    if not before.finished:
        confirm(f"Stop {run_id}, {before.state}?", yes)
        stopped = jobs.stop(run_id)
    if as_json:
        print_json({"run_id": run_id, "stopped": stopped, "state_before": before.state})
    else:
        click.echo(f"{run_id} is being stopped" if stopped else f"{run_id} had already ended: {before.state}")


def _jobs(address: str) -> "RayJobs":
    from iris_ray.remote.ray_jobs import RayJobs

    return RayJobs(address)


def _facts(status: "RayJobStatus") -> dict[str, object]:
    return {
        "run": status.run_id,
        "state": status.state,
        "message": one_line(status.message),
        "jobs": ", ".join(status.job_ids) or "none yet",
    }


def _program(target: str, directory: Path) -> list[str]:
    """Return how the cluster runs a target: a script of the directory by Python, anything else as a program.

    Raises:
        InvalidRequestError: there is no such script.
    """
    if not target.endswith(".py"):
        return [target]
    for candidate in (directory / target, Path(target)):
        if candidate.is_file() and candidate.resolve().is_relative_to(directory.resolve()):
            return ["python", str(candidate.resolve().relative_to(directory.resolve()))]
    if Path(target).is_file():
        raise InvalidRequestError(f"{target} is not in {directory}, which is what is sent; give another --working-dir")
    raise InvalidRequestError(f"{unknown('script', target, sorted(path.name for path in directory.glob('*.py')))}")


def _interrupted(jobs: "RayJobs", run_id: str) -> NoReturn:
    if on_a_terminal() and really_cancel("leave it running", default=False):
        jobs.stop(run_id)
        say_error(f"{run_id} is being stopped")
    else:
        say_error(f"{run_id} goes on; iris-ray logs -f, status and cancel take its id with the same --address")
    raise click.exceptions.Exit(INTERRUPTED)
