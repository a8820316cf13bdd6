"""``iris-ray cluster settings``: what operators have decided for the whole cluster."""

import time
from collections.abc import Iterable, Mapping
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import all_settings, setting_named
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.conventions import SuggestingGroup
from iris_ray.cli.output import ListForm, json_option, list_options, print_ids
from iris_ray.cli.printing import print_json, print_table
from iris_ray.errors import InvalidRequestError
from iris_ray.model.cluster_settings import WasSet

_HEADERS = ("SETTING", "VALUE", "DEFAULT", "GIVE", "SET BY", "MEANING")


class SettingNow(TypedDict):
    """A setting of the cluster.

    Attributes:
        value: its present value, as text.
        default: its default, as text.
        form: the form of its values.
        help: its effect.
        set_by, set_at: the user who set it, and the time, in seconds since the epoch; None for the default.
    """

    value: str
    default: str
    form: str
    help: str
    set_by: str | None
    set_at: float | None


@click.group("settings", cls=SuggestingGroup, invoke_without_command=True)
@list_options(Mapping[str, SettingNow], "settings' names")
@address_option
@click.pass_context
def settings(context: click.Context, form: ListForm) -> None:
    """Settings of the whole cluster: show, set or reset them.

    \b
      iris-ray cluster settings
      iris-ray cluster settings set operators=olga,otto eviction_grace_s=60
      iris-ray cluster settings reset eviction_grace_s

    A running Controller and its successors follow at once. Only operators may set them; while the setting operators is
    not set, everybody is an operator.
    """
    if context.invoked_subcommand is None:
        with cluster():
            found = ControllerConnection().ask(ControllerInterface.list_settings)
        if form.only_ids:
            print_ids(all_settings())
            return
        show(found, all_settings(), form.as_json)


@settings.command("set")
@click.argument("assignments", nargs=-1, required=True, metavar="NAME=VALUE...")
@json_option(Mapping[str, SettingNow])
@address_option
def set_(assignments: tuple[str, ...], as_json: bool) -> None:
    """Set settings, all or none."""
    from iris_ray.client.connection import current_user

    wanted = read_assignments(assignments)
    with cluster():
        found = ControllerConnection().ask(ControllerInterface.set_settings, wanted, False, current_user())
    show(found, wanted, as_json)


@settings.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option(Mapping[str, SettingNow])
@address_option
def reset(names: tuple[str, ...], as_json: bool) -> None:
    """Give settings their defaults again."""
    from iris_ray.client.connection import current_user

    wanted: dict[str, str | None] = {setting_named(name).name: None for name in names}
    with cluster():
        found = ControllerConnection().ask(ControllerInterface.set_settings, wanted, False, current_user())
    show(found, wanted, as_json)


def read_assignments(assignments: Iterable[str]) -> dict[str, str | None]:
    """Return the texts by the names of the settings.

    Raises:
        InvalidRequestError: an assignment is not NAME=VALUE, there is no such setting, or it can't have the value.
    """
    found: dict[str, str | None] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        setting = setting_named(name.strip())
        if not equals:
            raise InvalidRequestError(f"{assignment!r} has no value; write {setting.name}=VALUE: {setting.form}")
        found[setting.name] = setting.checked(text)
    return found


def show(was_set: Mapping[str, WasSet], names: Iterable[str], as_json: bool) -> None:
    """Print how some settings stand."""
    rows = [(all_settings()[name], was_set.get(name)) for name in names]
    if as_json:
        print_json(
            {
                one.name: SettingNow(
                    value=one.default if was is None else was.text,
                    default=one.default,
                    form=one.form,
                    help=one.help,
                    set_by=None if was is None else was.user,
                    set_at=None if was is None else was.at,
                )
                for one, was in rows
            }
        )
        return
    cells = [
        (one.name, one.default if was is None else was.text, one.default, one.form, _set_by(was), one.help)
        for one, was in rows
    ]
    print_table(_HEADERS, cells, "no settings")


def _set_by(was: WasSet | None) -> str:
    return "" if was is None else f"{was.user}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(was.at))}"
