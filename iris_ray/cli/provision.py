"""``iris-ray provision``: ask Google for the slices that waiting jobs miss, and give unused ones back."""

import re
import time
from pathlib import Path

import click

from iris_ray.actors.wire.controller_connection import ControllerConnection, find_controller
from iris_ray.cli.address import address_option, chosen_address, cluster
from iris_ray.cli.options import FiniteRange
from iris_ray.client.connection import AUTO
from iris_ray.cloud.provisioning import Settings
from iris_ray.cloud.queued_slices import OWNER_LABEL, NewSlice
from iris_ray.cloud.startup_script import HEAD_MARK, STARTUP_SCRIPT
from iris_ray.errors import InvalidRequestError
from iris_ray.model.cluster_settings import CLOUD_TPU
from iris_ray.model.topology import get_tpu_config

DAY_S = 86_400.0
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}")


@click.command(short_help="Ask Google for slices that waiting jobs miss, and give unused ones back.")
@click.option("--type", "tpu_type", required=True, metavar="TYPE", help="The type of all slices, such as v6e-16.")
@click.option("--min", "least", type=click.IntRange(0), default=0, show_default=True, help="Slices to keep at least.")
@click.option("--max", "most", type=click.IntRange(1), required=True, help="Slices to have at most.")
@click.option(
    "--location",
    metavar="PLACE",
    help=f"projects/PROJECT/locations/ZONE.  [default: the cluster's setting {CLOUD_TPU.name}]",
)
@click.option("--runtime-version", required=True, metavar="NAME", help="Of the TPU software, such as v2-alpha-tpuv6e.")
@click.option("--spot", is_flag=True, help="Slices that may be preempted at any time; otherwise on demand.")
@click.option(
    "--startup-script",
    "script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Run on each host; {HEAD_MARK} in it becomes the head's address. No secrets: everybody in the project can"
    " read it.  [default: one that runs ray start]",
)
@click.option("--head", metavar="HOST:PORT", help="Where hosts join the cluster.  [default: --address]")
@click.option("--external-ips", is_flag=True, help="Give hosts addresses of their own on the internet.")
@click.option("--name", "owner", default="iris", show_default=True, help="Of this provisioner: it marks its slices.")
@click.option(
    "--idle",
    "idle_s",
    type=FiniteRange(0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a slice must be unused before it is given back.",
)
@click.option(
    "--every",
    "every_s",
    type=FiniteRange(1, DAY_S),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="Look and act once, then end.")
@click.option("--dry-run", is_flag=True, help="Look once, and print what would be done. Changes nothing.")
@address_option
def provision(
    tpu_type: str,
    least: int,
    most: int,
    location: str | None,
    runtime_version: str,
    spot: bool,
    script: Path | None,
    head: str | None,
    external_ips: bool,
    owner: str,
    idle_s: float,
    every_s: float,
    once: bool,
    dry_run: bool,
) -> None:
    """Ask Google for slices that waiting jobs miss, and give back slices that no job needs.

    This runs until you end it; the slices that it has made stay. It never touches slices that it has not made. Run one
    for each type and zone; --dry-run first.

    \b
      iris-ray provision --type v6e-16 --max 4 --spot --runtime-version v2-alpha-tpuv6e --dry-run
    """
    from iris_ray.cli.provisioner import Jobs, Provisioner
    from iris_ray.cloud.cloud_tpu import CloudTpu

    config = get_tpu_config(tpu_type)
    if most < least:
        raise InvalidRequestError(f"--max is {most}, which is less than --min {least}")
    if not _NAME.fullmatch(owner):
        raise InvalidRequestError(f"--name is {owner!r}; give up to 16 small letters and digits, a letter first")
    zone = CloudTpu.at(location) if location else None  # a malformed one is refused before it connects
    text = startup_script(script.read_text() if script else STARTUP_SCRIPT, head or chosen_address())
    settings = Settings(owner, config, least, most, idle_s)
    template = NewSlice("", config.accelerator_type, runtime_version, {OWNER_LABEL: owner}, text, spot, external_ips)
    with cluster():
        provisioner = Provisioner(settings, zone or CloudTpu.at(_zone_of_the_cluster()), Jobs(), template, dry_run)
        provisioner.turn()
        while not (once or dry_run):
            time.sleep(every_s)
            provisioner.try_turn()


def _zone_of_the_cluster() -> str:
    found = ControllerConnection().list_settings() if find_controller() else {}
    if CLOUD_TPU.name not in found or (zone := CLOUD_TPU.parse(found[CLOUD_TPU.name].text)) is None:
        raise InvalidRequestError(
            "give --location projects/PROJECT/locations/ZONE, or set it for the cluster: iris-ray settings set"
            f" {CLOUD_TPU.name}=projects/PROJECT/locations/ZONE"
        )
    return zone


def startup_script(text: str, head: str) -> str:
    """Return the script with the head's address in it.

    Raises:
        InvalidRequestError: the script needs the address, and no other host could join at it.
    """
    if HEAD_MARK not in text:
        return text
    if head == AUTO or not _ADDRESS.fullmatch(head):
        raise InvalidRequestError(f"the cluster's address is {head!r}; give --head HOST:PORT, as other hosts see it")
    return text.replace(HEAD_MARK, head)
