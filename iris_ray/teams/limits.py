"""``iris-ray cluster limits``: how much each user may have."""

from typing import Any

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.status import LimitStatus
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.output import ListForm, list_options
from iris_ray.errors import InvalidRequestError
from iris_ray.model.limits import EVERYBODY, Limits
from iris_ray.model.options import PriorityBand
from iris_ray.teams.calls import TeamCalls

EVERYBODY_IN_WORDS = "everybody"
_HEADERS = ("USER", "BAND", "CHIPS", "RUNNING JOBS", "QUEUED JOBS", "TASKS", "NOTE")


@click.command()
@click.argument("user", required=False)
@click.option("--priority", type=click.Choice([band.name.lower() for band in PriorityBand]), help="Only in this band.")
@click.option(
    "--chips", type=click.FloatRange(0), metavar="N", help="Chips and GPUs in use, spares included; others wait."
)
@click.option("--running-jobs", type=click.IntRange(0), metavar="N", help="Jobs that have hosts; others wait.")
@click.option("--queued-jobs", type=click.IntRange(0), metavar="N", help="Jobs that wait; more are refused.")
@click.option("--tasks", type=click.IntRange(0), metavar="N", help="Tasks of unfinished jobs; more are refused.")
@click.option("--reset", is_flag=True, help="Forget the limits that were set for USER before.")
@list_options(list[LimitStatus], "users")
@address_option
def limits(user: str | None, priority: str | None, reset: bool, form: ListForm, **numbers: Any) -> None:
    """Show how much each user has and may have in each band, or set limits for USER, or for "everybody".

    \b
      iris-ray cluster limits
      iris-ray cluster limits ann --priority batch --chips 256
      iris-ray cluster limits everybody --running-jobs 20
      iris-ray cluster limits ann --reset

    A limit holds in each band by itself: --chips 256 without --priority allows 256 chips in each of the bands. Running
    jobs continue, even beyond a new limit. Limits last until they are set anew or --reset, also after a restart of the
    Controller. Only operators may set them.
    """
    from iris_ray.client.connection import current_user

    wanted = Limits(**numbers)
    bands = [PriorityBand[priority.upper()]] if priority else list(PriorityBand)
    if user is None and (reset or not wanted.is_empty):
        raise InvalidRequestError(
            f"whose limits? Give a user, or {EVERYBODY_IN_WORDS}: iris-ray cluster limits ann --chips 256"
        )
    whose = EVERYBODY if user == EVERYBODY_IN_WORDS else user
    with cluster():
        controller = ControllerConnection()
        if whose is None or (wanted.is_empty and not reset):
            found = controller.ask(TeamCalls.list_limits)
        else:
            found = controller.ask(TeamCalls.set_limits, whose, bands, wanted, reset, current_user())
    shown = [one for one in found if whose in (None, one.user) and one.band in bands]
    none = f"nothing is set for {user}, and no job of that user is there: the limits of everybody hold"
    form.show(shown, _whose, _HEADERS, _row, none)


def _whose(one: LimitStatus) -> str:
    return EVERYBODY_IN_WORDS if one.user == EVERYBODY else one.user


def _row(one: LimitStatus) -> tuple[object, ...]:
    limits, for_all = one.limits, one.user == EVERYBODY
    pairs = (
        (one.chips, limits.chips),
        (one.running_jobs, limits.running_jobs),
        (one.queued_jobs, limits.queued_jobs),
        (one.tasks, limits.tasks),
    )
    cells = [f"{most:.10g}" if for_all else f"{have:.10g}/{most:.10g}" for have, most in pairs]
    own = [name.replace("_", " ") for name, value in one.set_here.items() if value is not None]
    note = f"set: {', '.join(own)}" if own else ""
    return _whose(one), one.band.name.lower(), *cells, note
