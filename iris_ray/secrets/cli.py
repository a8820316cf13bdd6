"""``iris-ray cluster secrets``: the cluster's store of secrets, which operators fill and jobs use by name."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster, node_address_option
from iris_ray.cli.conventions import SuggestingGroup, confirm
from iris_ray.cli.options import yes_option
from iris_ray.cli.output import ListForm, json_option, list_options
from iris_ray.cli.printing import counted, one_line, print_json
from iris_ray.errors import InvalidRequestError
from iris_ray.model.secret import require_secret_name
from iris_ray.secrets.calls import SecretCalls, SecretStatus
from iris_ray.secrets.core import MOST_BYTES, StoredSecret, require_audience, text_of

_HEADERS = ("NAME", "REVISION", "SET BY", "SET AT", "FOR", "JOBS", "NOTE")


@click.group("secrets", cls=SuggestingGroup)
def secrets() -> None:
    """The cluster's secrets, such as API keys: set by operators and used by jobs. No command lists their values.

    \b
      iris-ray cluster secrets set WANDB_API_KEY          asks for the value
      iris-ray cluster secrets set WANDB_API_KEY < key
      iris-ray cluster secrets set GCP --from-file key.json --team research
      iris-ray cluster secrets ls
      iris-ray cluster secrets rm WANDB_API_KEY

    A job names them: --secret WANDB_API_KEY=store:, or secrets={"WANDB_API_KEY": Secret.from_store("WANDB_API_KEY")}
    in Python. Its tasks can read them, and so can their user and operators with `iris-ray exec`. They are files on the
    cluster's head that only Ray's account can read, and outlast the cluster if the head's disk does.
    """


class SecretSet(TypedDict):
    """A secret that was set, without its value.

    Attributes:
        secret: as it is now.
        before: the secret that it replaces, or None.
    """

    secret: StoredSecret
    before: StoredSecret | None


class SecretRemoved(TypedDict):
    """A secret that was removed.

    Attributes:
        name: its name.
        jobs: the unfinished jobs that can't start again without it.
    """

    name: str
    jobs: Sequence[str]


@secrets.command("set")
@click.argument("name")
@click.argument("rest", nargs=-1, metavar="")
@click.option(
    "--from-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="A file with the value."
)
@click.option(
    "--user",
    "users",
    multiple=True,
    metavar="USER",
    help="Only for jobs of these users, and of the teams of --team. Repeatable.",
)
@click.option(
    "--team",
    "teams",
    multiple=True,
    metavar="TEAM",
    help="Only for jobs of these teams and their parts, and of the users of --user. Repeatable.",
)
@json_option(SecretSet)
@node_address_option
def set_(
    name: str, rest: Sequence[str], from_file: Path | None, users: Sequence[str], teams: Sequence[str], as_json: bool
) -> None:
    """Set the secret NAME, or give it a new value: from stdin, or from a file.

    On a terminal it asks for the value, and shows nothing of it. The next attempt of each job gets the new value;
    running tasks keep the old one. Without --user and --team all jobs may use it, even if it was restricted before.
    Only operators may do this.
    """
    from iris_ray.client.connection import current_user

    require_secret_name(name)
    require_audience(users, teams)
    if rest:
        raise InvalidRequestError(
            "the value can't be an argument, as the shell's history and ps show arguments: give it by stdin, or by"
            " --from-file FILE. It may be in the shell's history now, so give a new one: iris-ray cluster secrets set"
            f" {name}"
        )
    value = _read(name, from_file)
    text_of(value)
    with cluster():
        found, before = ControllerConnection().ask(
            SecretCalls.set_secret, name, value, tuple(users), tuple(teams), current_user()
        )
    if as_json:
        print_json(SecretSet(secret=found, before=before))
    else:
        click.echo(f"{name} is set, revision {found.revision}{_instead_of(before)}")
    if before is not None and (before.users or before.teams) and not (users or teams):
        click.echo(f"note: it was for {_audience(before)} only, and is for all jobs now", err=True)


def _read(name: str, path: Path | None) -> bytes:
    """Return the value from a file, from the terminal or from stdin."""
    if path is None and sys.stdin is None:
        raise InvalidRequestError("stdin is closed; give the value by stdin, or by --from-file FILE")
    if path is None and sys.stdin.isatty():
        typed: str = click.prompt(f"Value of {name}", hide_input=True, confirmation_prompt=True, err=True)
        return typed.encode(errors="surrogateescape")
    try:
        if path is None:
            return sys.stdin.buffer.read(MOST_BYTES + 1)
        with path.expanduser().open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"the file {path or 'at stdin'} can't be read: {error.strerror}") from None


def _instead_of(before: StoredSecret | None) -> str:
    if before is None:
        return ""
    if before.problem:
        return f"; it replaces one that could not be read ({one_line(before.problem)})"
    return f"; it replaces what {before.set_by} set on {_time(before.set_at)}"


@secrets.command()
@list_options(list[SecretStatus], "names")
@address_option
def ls(form: ListForm) -> None:
    """Names of all secrets, who set each and when, and how many jobs use it. Values are never shown."""
    with cluster():
        found = ControllerConnection().ask(SecretCalls.list_secrets)
    none = "the store has no secrets; an operator sets one: iris-ray cluster secrets set NAME"
    form.show(found, lambda one: one.secret.name, _HEADERS, _row, none)


def _row(one: SecretStatus) -> tuple[object, ...]:
    secret = one.secret
    if secret.problem:
        return secret.name, "", "", "", "", len(one.jobs) or "", secret.problem
    whose = _audience(secret) or "all jobs"
    return secret.name, secret.revision, secret.set_by, _time(secret.set_at), whose, len(one.jobs) or "", ""


def _audience(secret: StoredSecret) -> str:
    return ", ".join([*(f"user {user}" for user in secret.users), *(f"team {team}" for team in secret.teams)])


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


@secrets.command()
@click.argument("name")
@yes_option
@json_option(SecretRemoved)
@node_address_option
def rm(name: str, yes: bool, as_json: bool) -> None:
    """Remove the secret NAME.

    Running tasks keep their value. Jobs that name it can't start again until it is set anew, and new ones are refused.
    On a terminal, the command asks if unfinished jobs name it. Only operators may do this.
    """
    from iris_ray.client.connection import current_user

    require_secret_name(name)
    with cluster():
        controller = ControllerConnection()
        found = controller.ask(SecretCalls.list_secrets)
        jobs = next((one.jobs for one in found if one.secret.name == name), ())
        if jobs:
            some = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if jobs[3:] else "")
            use = "uses" if len(jobs) == 1 else "use"
            click.echo(f"{counted(len(jobs), 'job')} {use} it, and can't start again without it: {some}", err=True)
            confirm(f"Remove {name}?", yes)
        controller.ask(SecretCalls.remove_secret, name, current_user())
    if as_json:
        print_json(SecretRemoved(name=name, jobs=jobs))
    else:
        click.echo(f"{name} is removed")
