"""``iris-ray slots``: the models that a `SlotClient` with a name serves. ``iris-ray serve``: those of a file."""

import functools
import gc
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypedDict

import click

from iris_ray.cli.address import address_option, cluster, node_address_option
from iris_ray.cli.conventions import SuggestingGroup
from iris_ray.cli.output import ListForm, json_option, list_options
from iris_ray.cli.printing import duration, print_json
from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import unknown
from iris_ray.slots.actors.messages import ModelRow, SlotRow, SlotStatus
from iris_ray.slots.client.slot_client import SlotClient

if TYPE_CHECKING:
    from iris_ray.slots.serving import FileModel, ServedFile

_SLOTS = ("SLOT", "MODEL", "RUNNER", "DEVICES", "MB", "STATE", "ACTIVE", "SESSIONS", "IDLE", "PID")
_SHOWN = {"port": "PORT", "model": "MODEL", "devices": 1, "memory": 0, "share": 1}
_RUNNERS = ("RUNNER", "MB OF EACH DEVICE", "FREE", "IN USE", "SLOTS", "MODELS")
_MODELS = ("MODEL", "SLOTS", "STARTING", "WAITING", "REPLICAS", "LOADS IN", "NOTE")


class Runner(TypedDict):
    """A runner: a host, or slice, that holds slots.

    Attributes:
        runner: its id.
        memory: bytes of each device that slots may use.
        free: bytes of each device that no slot has booked.
        in_use: bytes of each device that all programs use, or of a host for CPUs that slots use; empty if that is not
            known.
        slots: how many slots it holds.
        models: the models of its slots.
    """

    runner: str
    memory: list[int]
    free: list[int]
    in_use: list[int]
    slots: int
    models: list[str]


class SlotEvicted(TypedDict):
    """A slot that takes no new requests, and ends after its running ones, or after `ServingPolicy.drain_s`."""

    slot_id: str


class Prewarmed(TypedDict):
    """A model that is loaded wherever nothing has to be evicted for it."""

    model: str


class FitOfModel(TypedDict):
    """A model of a file, with ``--dry-run``.

    Attributes:
        model: its name.
        serves: the class or program that serves it, in words.
        fits_on: where it fits.
        replicas: how many slots are kept.
        aliases: its other names.
    """

    model: str
    serves: str
    fits_on: str
    replicas: int
    aliases: Sequence[str]


def of_models(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--name``. It is called with the `SlotClient` of that name."""

    @functools.wraps(command)
    def called(name: str, **given: Any) -> None:
        with cluster():
            command(SlotClient.connect(name), **given)

    return click.option(
        "--name",
        default="slots",
        show_default=True,
        metavar="NAME",
        help="The name under which the models are served.",
    )(called)


@click.group("slots", cls=SuggestingGroup)
def slots() -> None:
    """Models that are served: their slots, what waits for them, and why.

    They are those that `iris-ray serve` or a SlotClient serves under the name "slots", or under that of --name.

    \b
      iris-ray slots ls
      iris-ray slots models
      iris-ray slots runners
      iris-ray slots why llama
      iris-ray slots prewarm llama
      iris-ray slots evict 1a2b3c4d5e6f
    """


@slots.command()
@list_options(list[SlotRow], "slots' ids")
@address_option
@of_models
def ls(client: SlotClient, form: ListForm) -> None:
    """Slots: which models are loaded, or being loaded, and where."""
    form.show(client.status().slots, lambda row: row.slot_id, _SLOTS, _slot, "no slots")


@slots.command()
@list_options(list[ModelRow], "models' names")
@address_option
@of_models
def models(client: SlotClient, form: ListForm) -> None:
    """Models: how many slots each has, and how many requests wait."""
    form.show(client.status().models, lambda row: row.model, _MODELS, _model, "no models")


@slots.command()
@list_options(list[Runner], "runners' ids")
@address_option
@of_models
def runners(client: SlotClient, form: ListForm) -> None:
    """Runners: the hosts, or slices, that hold slots, and what is free and in use on their devices.

    FREE is the memory that slots have not booked. IN USE is the memory that all programs use, as NVIDIA's driver last
    reported it (it is asked once a minute); on hosts for CPUs, that of slots; for TPU chips it is not known.
    """
    found = client.status()
    form.show([_runner(runner, found) for runner in found.runners], lambda one: one["runner"], _RUNNERS, _runner_row,
              "no runners: their jobs wait for hosts, see `iris-ray ls`")  # fmt: skip


@slots.command()
@click.argument("slot")
@json_option(SlotEvicted)
@node_address_option
@of_models
def evict(client: SlotClient, slot: str, as_json: bool) -> None:
    """End a slot after its running requests.

    Requests that still run after drain_s, a minute by default, are cut off. They run again if they may be repeated and
    their callers have no part of the answer yet. Sessions take no further calls; their running calls get the same
    time. If the model then has fewer slots than its replicas, or requests for it wait, it is loaded again.
    """
    client.evict(slot)
    if as_json:
        return print_json(SlotEvicted(slot_id=slot))
    click.echo(f"slot {slot} takes no new requests; it ends after its running ones, or after drain_s")


@slots.command()
@click.argument("model")
@json_option(Prewarmed)
@node_address_option
@of_models
def prewarm(client: SlotClient, model: str, as_json: bool) -> None:
    """Load a model on every runner that lacks it, also on each new one, if nothing has to be evicted for it."""
    client.prewarm(model)
    if as_json:
        return print_json(Prewarmed(model=model))
    click.echo(f"{model} is loaded where nothing has to be evicted for it")


@slots.command()
@click.argument("model")
@json_option(ModelRow)
@address_option
@of_models
def why(client: SlotClient, model: str, as_json: bool) -> None:
    """Why requests for a model wait, or replicas are missing."""
    rows = {row.model: row for row in client.status().models}
    if model not in rows:
        raise unknown("model", model, list(rows))
    if as_json:
        return print_json(rows[model])
    click.echo(f"{model}: {_reason(rows[model])}")


GRACE_S = 30.0
"""How long requests may go on after SIGTERM. After Ctrl-C they have `CLOSE_S`."""


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only check the file, and say where each model fits.")
@list_options(list[FitOfModel], "models' names (with --dry-run)")
@node_address_option
def serve(file: Path, dry_run: bool, form: ListForm) -> None:
    """Serve the models of a file as OpenAI's API, until Ctrl-C or SIGTERM.

    \b
      iris-ray serve models.toml --dry-run
      iris-ray serve models.toml
      kill -HUP PID                               # reads the file again

    docs/serving.md describes the file. An invalid file is refused as a whole. If it is invalid when it is read again,
    the models are served as before. Models, aliases and keys can be changed in this way; hosts, name, address,
    timeout_s and policy only by a restart. After SIGTERM, running requests may go on for 30 s; after Ctrl-C, for 2 s.
    --json and --quiet are for --dry-run.
    """
    if not (dry_run or form.is_table):
        raise click.UsageError("--json and --quiet are for --dry-run.")
    from iris_ray.slots import serving
    from iris_ray.slots.front.http_front import CLOSE_S

    sys.path.insert(0, "")  # classes of the file may be in this directory
    said = serving.read(file)
    fits = [FitOfModel(model=name, serves=_what(model), fits_on=said.place(name), replicas=said.orders[name].replicas,
                       aliases=model.aliases) for name, model in said.models.items()]  # fmt: skip
    headers = "MODEL", "SERVES", "FITS ON", "REPLICAS", "ALIASES"
    form.show(fits, lambda one: one["model"], headers, _fit, "no models")
    if dry_run:
        return
    serving.require_free_port(said)
    heard: SimpleQueue[int] = SimpleQueue()
    signal.signal(signal.SIGHUP, lambda number, _: heard.put(number))  # else it would end a start that takes long
    with cluster(show_logs=True), SlotClient(said.hosts, name=said.name, policy=said.policy) as client:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, _: heard.put(number))
        served = serving.ServedFile(client, said)
        client._when_lost(lambda: heard.put(_LOST))
        gc.collect()
        gc.freeze()  # else Python looks at all modules again and again, which holds up requests for 100 ms
        with served.front as front:
            click.echo(f"{len(said.models)} models at {front.url}/v1; Ctrl-C ends it, SIGHUP reads the file again")
            while (number := heard.get()) in (signal.SIGHUP, _LOST):
                if number == signal.SIGHUP:
                    _read_again(served, file)
                    continue
                click.echo("the SlotManager is gone; a new one loads the models again", err=True)
                served.recover()
                client._when_lost(lambda: heard.put(_LOST))
            front.close(GRACE_S if number == signal.SIGTERM else CLOSE_S)


_LOST = 0
"""Stands for the loss of the SlotManager among the numbers of signals."""


def _read_again(served: "ServedFile", file: Path) -> None:
    from iris_ray.slots import serving

    try:
        changes = served.change(serving.read(file))
        click.echo("; ".join(changes) or "nothing has changed")
    except InvalidSlotError as error:
        click.echo(f"nothing has changed: {error}", err=True)
    except Exception as error:  # the models that are served stay
        click.echo(f"perhaps not all is changed; SIGHUP tries again: {type(error).__name__}: {error}", err=True)


def _fit(one: FitOfModel) -> tuple[object, ...]:
    return one["model"], one["serves"], one["fits_on"], one["replicas"], ", ".join(one["aliases"])


def _what(model: "FileModel") -> str:
    return model.model if isinstance(model.model, str) else model.model.words(**_SHOWN)[0]


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


def _runner(runner: str, found: SlotStatus) -> Runner:
    here = [row for row in found.slots if row.runner == runner]
    memory, free, in_use = (list(each.get(runner, ())) for each in (found.memory, found.runners, found.in_use))
    return Runner(runner=runner, memory=memory, free=free, in_use=in_use, slots=len(here),
                  models=sorted({row.model for row in here}))  # fmt: skip


def _runner_row(one: Runner) -> tuple[object, ...]:
    amounts = map(_megabytes, (one["memory"], one["free"], one["in_use"]))
    return one["runner"], *amounts, one["slots"], ", ".join(one["models"])


def _megabytes(amounts: list[int]) -> str:
    return " ".join(f"{each / 10**6:,.0f}" for each in amounts) or "-"


def _slot(row: SlotRow) -> tuple[object, ...]:
    megabytes = f"{row.memory / 10**6:,.0f}"
    devices = ",".join(map(str, row.devices))
    served = row.active, row.sessions, duration(row.idle_s)
    return row.slot_id, row.model, row.runner, devices, megabytes, row.state, *served, row.pid


def _model(row: ModelRow) -> tuple[object, ...]:
    note = row.waits_for or (f"{row.failures} loads have failed" if row.failures else "")
    loads_in = f"{row.load_s:.1f} s" if row.slots else "-"
    return row.model, row.slots, row.starting, row.waiting, row.replicas, loads_in, note
