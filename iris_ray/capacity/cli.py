"""``iris-ray cluster provision``: request the slices that waiting jobs need from Google, and delete idle ones."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.capacity.cloud_tpu import NOT_SERVED, CloudTpu
from iris_ray.capacity.compute_engine import ComputeEngine, machine_type
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.prices import Prices, read_prices
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, Provider, Source
from iris_ray.capacity.provisioner import Jobs, Provisioner, print_line
from iris_ray.capacity.settings import CLOUD_TPU
from iris_ray.capacity.start_up import HEAD_MARK, STARTUP_SCRIPT, script_for_docker, startup_script
from iris_ray.cli.address import chosen_address, cluster, node_address_option
from iris_ray.cli.options import tpu_option
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import print_json
from iris_ray.cli.times import Duration
from iris_ray.client.connection import AUTO
from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.checks import shown
from iris_ray.model.topology import TPUConfig, get_tpu_config

DAY_S = 86_400.0
CLOUD_TPU_API, COMPUTE_ENGINE = "cloud-tpu", "compute-engine"
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_TAG = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NETWORK = re.compile(rf"(?:projects/[a-z0-9.:-]+/(?:global/networks|regions/[a-z0-9-]+/subnetworks)/)?{_TAG.pattern}")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_RUNTIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GCE = "pip install google-cloud-compute"


class ProvisionerLine(TypedDict):
    """Something that the provisioner did, would do or could not do. It prints one such object on each line.

    Attributes:
        at: the time, in seconds since the epoch.
        problem: whether something is wrong.
        text: a description, in a sentence.
    """

    at: float
    problem: bool
    text: str


@click.command(short_help="Request slices from Google that waiting jobs need, and delete idle ones.")
@tpu_option("Slices of this type; repeatable.", required=True, multiple=True)
@click.option(
    "--min",
    "least",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    show_default=True,
    help="The number of slices of each type to keep, whether jobs need them or not.",
)
@click.option(
    "--max",
    "most",
    type=click.IntRange(1),
    metavar="N",
    help="The largest number of slices of each type. Required without --budget.",
)
@click.option(
    "--budget",
    type=click.IntRange(1),
    metavar="CHIPS",
    help="The largest number of chips to request and hold, over all types.",
)
@click.option(
    "--location",
    "locations",
    multiple=True,
    metavar="PLACE[:CHIPS]",
    help="A zone, projects/PROJECT/locations/ZONE, and its quota. Repeatable; zones are asked in this order."
    f"  [default without --reservation: the cluster's setting {CLOUD_TPU.name}]",
)
@click.option(
    "--reservation",
    "reservations",
    multiple=True,
    metavar="NAME[:CHIPS]",
    help="projects/PROJECT/locations/ZONE/reservations/NAME, and its chips. Repeatable; asked before all --location.",
)
@click.option(
    "--api",
    type=click.Choice([CLOUD_TPU_API, COMPUTE_ENGINE]),
    default=CLOUD_TPU_API,
    show_default=True,
    help=f"Which API of Google to use; {COMPUTE_ENGINE} needs {_GCE}.",
)
@click.option(
    "--runtime-version",
    metavar="NAME",
    help=f"The TPU software of the hosts, such as v2-alpha-tpuv6e. Required with {CLOUD_TPU_API}.",
)
@click.option(
    "--vm-image",
    metavar="IMAGE",
    help=f"The image of the hosts' disks, for {COMPUTE_ENGINE}.  [default: Google's for TPUs]",
)
@click.option("--spot", is_flag=True, help="Request slices that may be preempted at any time; otherwise on demand.")
@click.option(
    "--flex-start",
    "max_run_s",
    type=Duration(600, 7 * DAY_S),
    help=f"Request slices that Google queues, and ends after this time, 10m to 7d; with --api {COMPUTE_ENGINE}.",
)
@click.option(
    "--max-wait",
    "max_wait_s",
    type=Duration(30),
    default="15m",
    show_default=True,
    help="How long a request may wait before another reservation or location that has room is asked instead.",
)
@click.option("--docker-image", metavar="IMAGE", help="Run Ray on each host in a container of this image.")
@click.option(
    "--startup-script",
    "script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"A script to run on each host; {HEAD_MARK} in it becomes the head's address. No secrets: everybody in the"
    " project can read it.  [default: one that runs ray start]",
)
@click.option(
    "--show-startup-script",
    "show_script",
    is_flag=True,
    help=f"Print the start-up script and exit. If it has {HEAD_MARK}, as the default one does, give --head,"
    " --address or $RAY_ADDRESS.",
)
@click.option(
    "--head", metavar="HOST:PORT", help="The address at which hosts join the cluster.  [default: the cluster's address]"
)
@click.option(
    "--network", default="", metavar="NAME", help="The network of the hosts: a name or a path.  [default: default]"
)
@click.option(
    "--subnetwork",
    default="",
    metavar="NAME",
    help="The subnetwork of the hosts: a name or a path.  [default: default]",
)
@click.option(
    "--service-account",
    default="",
    metavar="EMAIL",
    help="The service account of the hosts.  [default: Compute Engine's]",
)
@click.option(
    "--tag", "tags", multiple=True, metavar="TAG", help="A network tag of the hosts, for firewall rules. Repeatable."
)
@click.option("--external-ips", is_flag=True, help="Give each host a public address.")
@click.option(
    "--name",
    "owner",
    default="iris",
    show_default=True,
    metavar="NAME",
    help="The name of this provisioner, which marks its slices.",
)
@click.option(
    "--idle",
    "idle_s",
    type=Duration(),
    default="10m",
    show_default=True,
    help="How long a slice must be idle before it is deleted; a minute at most if a job on another type needs its"
    " chips.",
)
@click.option(
    "--take-back",
    type=click.Choice([reach.value for reach in Reach]),
    default=Reach.LOWER_BANDS.value,
    show_default=True,
    help=f"How a waiting job gets chips of slices of other types. {Reach.IDLE}: idle slices are deleted."
    f" {Reach.LOWER_BANDS}: jobs of lower bands also leave slices. {Reach.HELD}: slices are also reserved for the job"
    " until enough of them are idle.",
)
@click.option(
    "--every",
    "every_s",
    type=Duration(1, DAY_S),
    default="30s",
    show_default=True,
    help="The interval between two checks of the cluster.",
)
@click.option(
    "--prices",
    "price_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with the prices of chip-hours, to show costs.",
)
@click.option("--once", is_flag=True, help="Check the cluster and act once, then exit.")
@click.option("--dry-run", is_flag=True, help="Check the cluster once, and print what would be done. Changes nothing.")
@json_option(ProvisionerLine)
@node_address_option
def provision(
    tpu_types: Sequence[str],
    least: int,
    most: int | None,
    budget: int | None,
    locations: Sequence[str],
    reservations: Sequence[str],
    api: str,
    runtime_version: str | None,
    vm_image: str | None,
    spot: bool,
    max_run_s: float | None,
    max_wait_s: float,
    docker_image: str | None,
    script: Path | None,
    show_script: bool,
    head: str | None,
    network: str,
    subnetwork: str,
    service_account: str,
    tags: Sequence[str],
    external_ips: bool,
    owner: str,
    idle_s: float,
    take_back: str,
    every_s: float,
    price_file: Path | None,
    once: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Request slices from Google that waiting jobs need, and delete slices that no job needs.

    This runs until you end it; its slices stay. It only touches slices that a provisioner of its --name has made. Try
    it with --dry-run first.

    It also deletes slices that have failed, have lacked hosts for minutes or never join the cluster. If --budget, or
    the chips of a reservation or location, leave no room for a waiting job, it deletes slices of other types for the
    job: idle ones, or, as far as --take-back says, ones that jobs of lower bands have to leave. You must be an
    operator, except to delete failed or suspended slices and requests that wait. docs/provisioner.md has the rules.

    \b
      iris-ray cluster provision --tpu v6e-16 --max 4 --spot --runtime-version v2-alpha-tpuv6e --dry-run
    """
    configs = tuple(dict.fromkeys(map(_config, tpu_types)))
    _require_limits(configs, least, most, budget)
    if not _NAME.fullmatch(owner):
        raise InvalidRequestError(f"--name is {owner!r}; give up to 16 small letters and digits, a letter first")
    if spot and max_run_s is not None:
        raise InvalidRequestError("--spot and --flex-start are two ways to pay for a slice; give one of them")
    image = _image(api, configs, runtime_version, vm_image, max_run_s)
    if script is not None and docker_image is not None:
        raise InvalidRequestError("--startup-script and --docker-image both say what hosts run; give one of them")
    for flag, value, pattern, instead in (
        ("--network", network, _NETWORK, "a name, or projects/PROJECT/global/networks/NAME"),
        ("--subnetwork", subnetwork, _NETWORK, "a name, or projects/PROJECT/regions/REGION/subnetworks/NAME"),
        ("--service-account", service_account, _EMAIL, "its email, such as hosts@my-project.iam.gserviceaccount.com"),
        *(("--tag", tag, _TAG, "small letters, digits and hyphens, a letter first") for tag in tags),
    ):
        if (value or flag == "--tag") and not pattern.fullmatch(value):
            raise InvalidRequestError(f"{flag} is {shown(value)}; give {instead}")
    default = script_for_docker(docker_image) if docker_image is not None else STARTUP_SCRIPT
    text = _text("--startup-script", script) if script else default
    given = head or chosen_address()
    text = text if given == AUTO else startup_script(text, given)
    if show_script:
        click.echo(startup_script(text, given), nl=False)
        return
    prices = read_prices(_text("--prices", price_file), str(price_file)) if price_file else Prices()
    market = Market.FLEX if max_run_s is not None else Market.SPOT if spot else Market.ON_DEMAND
    at: Callable[[str], Provider] = CloudTpu.at if api == CLOUD_TPU_API else ComputeEngine.at
    sources = [Source.reserved(name) for name in reservations]
    if len({source.key for source in sources}) < len(sources):
        raise InvalidRequestError("a --reservation is given twice; give each once, since its chips count once")
    zones_given = dict.fromkeys(Source.unreserved(location, market) for location in locations)
    if len({source.key for source in zones_given}) < len(zones_given):
        raise InvalidRequestError("a --location is given with two numbers of chips; give it once")
    sources += zones_given
    for source in sources:
        at(source.location)  # a missing client of Google's is told here
    with cluster():
        if not sources:
            sources = [Source(location, market) for location in _zones_of_the_cluster()]
        settings = Settings(owner, configs, tuple(sources), least, most, idle_s, max_wait_s, budget, Reach(take_back))
        zones = [at(location) for location in dict.fromkeys(source.location for source in sources)]
        for zone in zones:
            for config in configs:
                zone.require_type(config)
        hosts = HostSettings(
            image=image,
            labels={OWNER_LABEL: owner},
            startup_script=text if HEAD_MARK not in text else startup_script(text, head_of_the_cluster()),
            external_ips=external_ips,
            network=network,
            subnetwork=subnetwork,
            service_account=service_account,
            tags=tuple(tags),
            max_run_s=None if max_run_s is None else round(max_run_s),
        )
        provisioner = Provisioner(
            settings, zones, Jobs(), hosts, prices, every_s, dry_run, _print_as_json if as_json else print_line
        )
        provisioner.run(once)


def _print_as_json(text: str, problem: bool) -> None:
    print_json(ProvisionerLine(at=time.time(), problem=problem, text=text), on_a_line=True)


def _config(tpu_type: str) -> TPUConfig:
    try:
        return get_tpu_config(tpu_type)
    except UnknownTPUTypeError as error:
        raise InvalidRequestError(f"--tpu {error}") from None


def _text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InvalidRequestError(f"{flag} {path} can't be read: {why}") from None


def _require_limits(configs: Sequence[TPUConfig], least: int, most: int | None, budget: int | None) -> None:
    """Refuse limits that contradict each other, or within which no slice fits."""
    if most is None and budget is None:
        raise InvalidRequestError("give --max SLICES, or --budget CHIPS, or both: how much may this hold?")
    if most is not None and most < least:
        raise InvalidRequestError(f"--max is {most}, which is less than --min {least}")
    if budget is None:
        return
    for config in configs:
        if config.chip_count > budget:
            raise InvalidRequestError(
                f"--budget is {budget} chips, and one slice of --tpu {config.name} has {config.chip_count}"
            )
    if (kept := least * sum(config.chip_count for config in configs)) > budget:
        raise InvalidRequestError(f"--budget is {budget} chips, and --min {least} keeps {kept}")


def _image(
    api: str, configs: Sequence[TPUConfig], runtime_version: str | None, vm_image: str | None, max_run_s: float | None
) -> str:
    """Return the image of the hosts; refuse options that the API does not serve."""
    if api == COMPUTE_ENGINE:
        if runtime_version is not None:
            raise InvalidRequestError(f"--runtime-version is for --api {CLOUD_TPU_API}; give --vm-image, or neither")
        for config in configs:
            machine_type(config)  # refuses types that this API does not have
        return vm_image or ""
    instead = f"use --api {COMPUTE_ENGINE}, for which this machine needs {_GCE}"
    for config in configs:
        if config.generation in NOT_SERVED:
            raise InvalidRequestError(
                f"Google's Cloud TPU API does not serve --tpu {config.name}: {instead}, or GKE (docs/gke.md)"
            )
    if max_run_s is not None:
        raise InvalidRequestError(f"Google's client of the Cloud TPU API knows no --flex-start: {instead}")
    if vm_image is not None:
        raise InvalidRequestError(f"--vm-image is for --api {COMPUTE_ENGINE}; give --runtime-version")
    if runtime_version is None:
        raise InvalidRequestError("give --runtime-version, the software of the hosts, such as v2-alpha-tpuv6e for v6e")
    if not _RUNTIME.fullmatch(runtime_version):
        raise InvalidRequestError(f"--runtime-version is {shown(runtime_version)}; give one such as v2-alpha-tpuv6e")
    return runtime_version


def _zones_of_the_cluster() -> tuple[str, ...]:
    found = ControllerConnection().ask(ControllerInterface.list_settings) if find_controller() else {}
    if CLOUD_TPU.name not in found or not (zones := CLOUD_TPU.parse(found[CLOUD_TPU.name].text)):
        raise InvalidRequestError(
            "give --location projects/PROJECT/locations/ZONE, or set it for the cluster: iris-ray cluster settings set"
            f" {CLOUD_TPU.name}=projects/PROJECT/locations/ZONE"
        )
    return zones


def head_of_the_cluster() -> str:
    """Return the address at which Ray's processes know the head, such as ``10.0.0.2:6379``.

    Raises:
        InvalidRequestError: no other host could join at it.
    """
    import ray

    address = str(ray.get_runtime_context().gcs_address)
    if address.startswith(("127.", "localhost", "[::1]")):
        raise InvalidRequestError(f"the head is known as {address}; give --head HOST:PORT, as other hosts see it")
    return address
