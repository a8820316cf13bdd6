"""``iris-ray job notifications``: who was told what about jobs, and a test of a destination."""

import time

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.conventions import FAILED, SuggestingGroup
from iris_ray.cli.output import ListForm, json_option, list_options
from iris_ray.cli.printing import print_json
from iris_ray.notify.calls import MOST_LISTED, Notification, NotifyCalls, Tested
from iris_ray.notify.destination import parse_destination

_HEADERS = ("WHEN", "JOB", "EVENT", "TO", "OUTCOME", "TRIES", "NOTE")


@click.group("notifications", cls=SuggestingGroup)
def notifications() -> None:
    """Notifications about jobs: the latest ones, and a test of a destination.

    \b
      iris-ray cluster secrets set TEAM_HOOK
      iris-ray job notifications test slack:TEAM_HOOK
      iris-ray submit train.py --notify slack:TEAM_HOOK,on=failed+stalled
      iris-ray job notifications ls

    The secret TEAM_HOOK is the address of a webhook. The channels are slack, googlechat, http, email and command.
    $IRIS_NOTIFY holds your default, and the cluster setting notify is for all jobs.
    """


@notifications.command("ls")
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("--limit", "-n", type=click.IntRange(1, MOST_LISTED), default=50, show_default=True, metavar="N",
              help="How many, the latest ones.")  # fmt: skip
@list_options(list[Notification], "ids of jobs")
@address_option
def ls(job_id: str | None, limit: int, form: ListForm) -> None:
    """List the latest notifications, of JOB or of all jobs, and whether each was delivered."""
    with cluster():
        found = ControllerConnection().ask(NotifyCalls.list_notifications, job_id, limit)
    form.show(found, lambda one: one.job_id, _HEADERS, _row, "nobody was told anything")


def _row(one: Notification) -> tuple[str, ...]:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(one.at))
    return when, one.job_id, one.event, one.to, one.outcome, str(one.tries or ""), one.error or one.text


@notifications.command("test")
@click.argument("destination")
@json_option(Tested)
@address_option
def test(destination: str, as_json: bool) -> None:
    """Send a test to DESTINATION, such as slack:TEAM_HOOK, once, and say whether the receiver has accepted it.

    The exit code is 1 if it has not.
    """
    from iris_ray.client.connection import current_user

    parse_destination(destination)
    with cluster():
        found = ControllerConnection().ask(NotifyCalls.test_notification, destination, current_user())
    if as_json:
        print_json(found)
    elif not found.problem:
        click.echo(f"{found.to} has accepted the test")
    if found.problem:
        if not as_json:
            click.echo(f"error: {found.to} has not accepted the test: {found.problem}", err=True)
        raise SystemExit(FAILED)
