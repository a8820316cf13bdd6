"""``iris-ray drain`` and ``undrain``: keep all new jobs off a slice or host."""

import click

from iris_ray.cli.address import address_option
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.options import json_option, reason_option
from iris_ray.cli.taints import DRAINED, TARGET_HELP, add_taint, lift_taint


@click.command(epilog=TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@reason_option
@json_option
@address_option
def drain(target: str, reason: str | None, as_json: bool) -> None:
    """Keep new jobs off a slice or host; what runs there goes on.

    \b
      iris-ray drain v4-32-7 --reason "bad link"
      iris-ray drain v4-32-7/3

    This sets the taint "drained". It lasts until `undrain`, also if the Controller restarts.
    """
    add_taint(target, DRAINED, reason, f"iris-ray undrain {target}", as_json)


@click.command(epilog=TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@json_option
@address_option
def undrain(target: str, as_json: bool) -> None:
    """Let a drained slice or host take new jobs again.

    \b
      iris-ray undrain v4-32-7
    """
    lift_taint(target, DRAINED, as_json)
