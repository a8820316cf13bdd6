"""The checks of ``iris-ray doctor`` on this machine: versions, user, ports, metadata server, chips, credentials."""

import platform
import random
import socket
import threading
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import iris_ray
from iris_ray.actors.host.chips import Devices, blocks, find_holders
from iris_ray.cli.printing import Finding, Level, counted
from iris_ray.doctor.host_look import (
    METADATA_TIMEOUT_S,
    NO_NOTICES,
    metadata_hosts,
    metadata_tells,
    metadata_variable,
)
from iris_ray.settings import USER

OLDEST_RAY, NEWEST_RAY = (2, 49), (2, 60)
"""The versions of Ray that iris_ray's use of private APIs was checked on."""
TASK_PORTS = range(20_000, 32_768)
"""The ports on which the tasks of a gang listen for each other."""
_PORTS_TRIED = 40
CREDENTIALS_TIMEOUT_S = 3.0
_CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_LOG_IN = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's file"


def check_versions() -> Finding:
    oldest, newest = (".".join(map(str, number)) for number in (OLDEST_RAY, NEWEST_RAY))
    install = f"pip install 'ray[default]=={newest}.*'"
    try:
        ray = version("ray")
    except PackageNotFoundError:
        return Finding(Level.ERROR, "versions", "Ray is not installed here", install)
    found = f"iris_ray {iris_ray.__version__}, Ray {ray}, Python {platform.python_version()}"
    if OLDEST_RAY <= tuple(map(int, ray.split(".")[:2])) <= NEWEST_RAY:
        return Finding(Level.OK, "versions", found)
    found += f"; this iris_ray was checked on Ray {oldest} to {newest}"
    return Finding(Level.WARNING, "versions", found, f"{install} here and in the cluster's image, or another iris_ray")


def check_user(environ: Mapping[str, str], user: str) -> Finding:
    if USER.read(environ):
        return Finding(Level.OK, "user", f"{user}, from {USER.name}")
    if user in ("root", "ray", "0"):
        advice = f"set {USER.name} to your name: users share the cluster fairly, and equal names count as one user"
        return Finding(Level.WARNING, "user", f"{user}, an account that all users may share", advice)
    return Finding(Level.OK, "user", f"{user}, the operating system's account")


def check_ports(ephemeral: tuple[int, int] | None) -> Finding:
    """Check whether tasks on this machine can listen on their ports.

    Args:
        ephemeral: the first and last port that the kernel gives to outgoing connections, or None if unknown.
    """
    name = f"ports {TASK_PORTS.start}-{TASK_PORTS.stop - 1}"
    tried = random.sample(TASK_PORTS, _PORTS_TRIED)
    usable = sum(map(_can_bind, tried))
    if not usable:
        advice = "tasks find no port to meet on: see what holds the ports (ss -ltn) or forbids them"
        return Finding(Level.ERROR, name, f"none of {_PORTS_TRIED} that were tried can be used on this machine", advice)
    if ephemeral and ephemeral[0] < TASK_PORTS.stop and ephemeral[1] >= TASK_PORTS.start:
        advice = f"sysctl net.ipv4.ip_local_port_range='{TASK_PORTS.stop} 60999' on every host"
        found = f"outgoing connections use ports {ephemeral[0]}-{ephemeral[1]}, which tasks need when they start"
        return Finding(Level.WARNING, name, found, advice)
    return Finding(Level.OK, name, f"usable on this machine ({usable} of {_PORTS_TRIED} that were tried are free)")


def ephemeral_ports() -> tuple[int, int] | None:
    """Return the first and last port that the kernel gives to outgoing connections, or None if unknown."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return None
    return int(first), int(last)


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def check_metadata(environ: Mapping[str, str]) -> Finding:
    """Check whether Google's metadata server answers within a second."""
    host = metadata_hosts(environ)[0]
    tells = metadata_tells(environ)
    if tells == "preemptions":
        return Finding(Level.OK, "metadata server", f"{host} answers: this is Google Cloud")
    if tells == "no preemptions":
        return Finding(Level.INFO, "metadata server", f"{host} answers, and announces no preemptions", NO_NOTICES)
    found = f"{host} does not answer within {METADATA_TIMEOUT_S:g} s"
    if name := metadata_variable(environ):
        advice = f"{name} names it: unset that, or make sure that it answers"
        return Finding(Level.WARNING, "metadata server", found, advice)
    advice = "nothing to do outside Google Cloud; on a TPU VM or in GKE make sure that it can be reached"
    return Finding(Level.INFO, "metadata server", found, advice)


def check_chips(devices: Devices) -> Finding:
    """Find the processes of this machine that hold its chips, or libtpu's lock."""
    if not devices.chips:
        return Finding(
            Level.INFO, "TPU chips", "this machine has none; on a TPU VM this check names the processes that hold them"
        )
    holders = find_holders(devices)
    found = counted(len(devices.chips), "chip device")
    if holders.seen:
        found += f", held by {', '.join(map(str, holders.seen))}"
        advice = "nothing to do if a job runs here (iris-ray host ls); if not, end them: libtpu allows one process"
        return Finding(Level.INFO, "TPU chips", found, advice)
    if blocks(devices.lock):
        found += f", held by no process that is visible here; but libtpu can't open {devices.lock}"
        return Finding(Level.WARNING, "TPU chips", found, f"if no process uses the chips: sudo rm {devices.lock}")
    if holders.hidden:
        found += f", held by none of our own processes; {holders.hidden} of other users can't be inspected"
        return Finding(Level.INFO, "TPU chips", found, "run this as root to see all processes")
    return Finding(Level.OK, "TPU chips", f"{found}, held by no process")


def check_credentials(environ: Mapping[str, str]) -> Finding:
    """Check whether Google's libraries find credentials here. The finding shows only kind, account and project."""
    answers: list[Finding] = []
    asking = threading.Thread(target=lambda: answers.append(_credentials(environ)), daemon=True)  # it may ask a server
    asking.start()
    asking.join(CREDENTIALS_TIMEOUT_S)
    return answers[0] if answers else _no_credentials(environ, f"none were found within {CREDENTIALS_TIMEOUT_S:g} s")


def _credentials(environ: Mapping[str, str]) -> Finding:
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about end-user credentials
            credentials, project = google.auth.default()
    except (GoogleAuthError, OSError, ValueError) as error:
        return _no_credentials(environ, (str(error).strip().splitlines() or ["none"])[0])
    kind = type(credentials).__module__.removeprefix("google.") + "." + type(credentials).__name__
    account = getattr(credentials, "service_account_email", None) or getattr(credentials, "account", None)
    found = f"{kind}, account {account or 'unknown'}, project {project or 'unknown'}"
    if not project:
        return Finding(Level.WARNING, "credentials", found, "set GOOGLE_CLOUD_PROJECT to the project of your TPUs")
    return Finding(Level.OK, "credentials", found)


def _no_credentials(environ: Mapping[str, str], found: str) -> Finding:
    if environ.get(_CREDENTIALS_VARIABLE):
        return Finding(Level.WARNING, "credentials", found, f"correct or unset {_CREDENTIALS_VARIABLE}")
    advice = f"nothing to do unless TPUs are created or deleted from here, with Google's API; then: {_LOG_IN}"
    return Finding(Level.INFO, "credentials", found, advice)
