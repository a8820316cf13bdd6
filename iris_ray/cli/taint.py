"""``iris-ray taint`` and ``untaint``: keep jobs off a slice or host, except those that tolerate it."""

import click

from iris_ray.cli.address import address_option
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.options import json_option, reason_option
from iris_ray.cli.taints import TARGET_HELP, add_taint, lift_taint


@click.command(epilog=TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@click.argument("name", metavar="NAME")
@reason_option
@json_option
@address_option
def taint(target: str, name: str, reason: str | None, as_json: bool) -> None:
    """Keep jobs away that don't tolerate the taint NAME; what runs there goes on.

    \b
      iris-ray taint v4-32-7 big-jobs --reason "for the run of May"

    A job tolerates it with `iris-ray submit --tolerate big-jobs`, or tolerations=["big-jobs"] in IrisClient.submit.
    """
    add_taint(target, name, reason, f"iris-ray untaint {target} {name}", as_json)


@click.command(epilog=TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@click.argument("name", metavar="NAME")
@json_option
@address_option
def untaint(target: str, name: str, as_json: bool) -> None:
    """Take the taint NAME off a slice or host.

    \b
      iris-ray untaint v4-32-7 big-jobs
    """
    lift_taint(target, name, as_json)
