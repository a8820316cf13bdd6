"""``iris-ray slots``: the models that a `SlotClient` with a name serves, and their slots."""

import click

from iris_ray.cli.address import Command, address_option, cluster
from iris_ray.cli.conventions import SuggestingGroup
from iris_ray.cli.options import json_option
from iris_ray.cli.printing import duration, print_json, print_table
from iris_ray.model.checks import unknown
from iris_ray.slots.actors.messages import ModelRow, SlotRow
from iris_ray.slots.client.slot_client import SlotClient

_SLOTS = ("SLOT", "MODEL", "RUNNER", "DEVICES", "MB", "STATE", "ACTIVE", "SESSIONS", "IDLE", "PID")
_MODELS = ("MODEL", "SLOTS", "STARTING", "WAITING", "REPLICAS", "LOADS IN", "NOTE")


def name_option(command: Command) -> Command:
    """Give a command ``--name``."""
    return click.option("--name", default="slots", show_default=True, help="That of the SlotClient.")(command)


@click.group("slots", cls=SuggestingGroup)
def slots() -> None:
    """Models that are served: their slots, what waits for them, and why.

    They are those of a SlotClient that was made with name="slots", or the name that --name gives.

    \b
      iris-ray slots ls
      iris-ray slots why llama
    """


@slots.command()
@name_option
@json_option
@address_option
def ls(name: str, as_json: bool) -> None:
    """Slots: the models that are loaded, and where."""
    with cluster():
        found = SlotClient.connect(name).status().slots
    if as_json:
        print_json(found)
        return
    print_table(_SLOTS, [_slot(row) for row in found], "no slots")


@slots.command()
@name_option
@json_option
@address_option
def models(name: str, as_json: bool) -> None:
    """Models: how many slots each has, and how many requests wait."""
    with cluster():
        found = SlotClient.connect(name).status().models
    if as_json:
        print_json(found)
        return
    print_table(_MODELS, [_model(row) for row in found], "no models")


@slots.command()
@click.argument("slot")
@name_option
@address_option
def evict(slot: str, name: str) -> None:
    """Let a slot end once its requests have."""
    with cluster():
        SlotClient.connect(name).evict(slot)
    click.echo(f"slot {slot} takes no more requests, and ends after those that it has")


@slots.command()
@click.argument("model")
@name_option
@address_option
def prewarm(model: str, name: str) -> None:
    """Load a model on every runner that has room, and on new ones."""
    with cluster():
        SlotClient.connect(name).prewarm(model)
    click.echo(f"{model} is loaded where nothing has to be evicted for it")


@slots.command()
@click.argument("model")
@name_option
@json_option
@address_option
def why(model: str, name: str, as_json: bool) -> None:
    """Why requests for a model wait, or replicas are missing."""
    with cluster():
        rows = {row.model: row for row in SlotClient.connect(name).status().models}
    if model not in rows:
        raise unknown("model", model, list(rows))
    if as_json:
        print_json(rows[model])
        return
    click.echo(f"{model}: {_reason(rows[model])}")


def _reason(row: ModelRow) -> str:
    missing = row.replicas - row.slots - row.starting
    if not row.waiting and missing > 0:
        lack = f"{missing} of {row.replicas} {'replicas is' if missing == 1 else 'replicas are'} missing"
        return f"{lack}: {row.waits_for}" if row.waits_for else lack
    if not row.waiting:
        return "nothing waits for it"
    many = f"{row.waiting} {'request waits' if row.waiting == 1 else 'requests wait'}"
    if row.starting:
        return f"{many} while {row.starting} {'slot loads' if row.starting == 1 else 'slots load'}"
    return f"{many}: {row.waits_for or 'all of its slots are busy'}"


def _slot(row: SlotRow) -> tuple[object, ...]:
    megabytes = f"{row.memory / 10**6:,.0f}"
    devices = ",".join(map(str, row.devices))
    served = row.active, row.sessions, duration(row.idle_s)
    return row.slot_id, row.model, row.runner, devices, megabytes, row.state, *served, row.pid


def _model(row: ModelRow) -> tuple[object, ...]:
    note = row.waits_for or (f"{row.failures} loads have failed" if row.failures else "")
    loads_in = f"{row.load_s:.1f} s" if row.slots else "-"
    return row.model, row.slots, row.starting, row.waiting, row.replicas, loads_in, note
