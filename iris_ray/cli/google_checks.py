"""What ``iris-ray doctor`` looks at on a TPU VM: who holds its chips, and whether Google knows who we are."""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from iris_ray.cli.checks import Finding, Level
from iris_ray.cli.tables import counted

LIBTPU_LOCK = Path("/tmp/libtpu_lockfile")
CREDENTIALS_TIMEOUT_S = 3.0
_CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_LOG_IN = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's file"


def chip_devices(dev: Path = Path("/dev")) -> list[Path]:
    """The device files of this machine's TPU chips."""
    return sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])


def check_chips(devices: Sequence[Path], lock: Path = LIBTPU_LOCK) -> Finding:
    """Which processes of this machine hold its chips, or libtpu's lock."""
    if not devices:
        return Finding(Level.INFO, "TPU chips", "this machine has none; on a TPU VM this says who holds them")
    holders, hidden = _holders({str(path) for path in (*devices, lock)})
    found = counted(len(devices), "chip device")
    if holders:
        found += f", held by {', '.join(holders)}"
        advice = "nothing to do if a job runs here (iris-ray workers); if not, end them: libtpu allows one process"
        return Finding(Level.INFO, "TPU chips", found, advice)
    if hidden:
        found += f", held by none of our own processes; {hidden} of other users can't be looked into"
        return Finding(Level.INFO, "TPU chips", found, "run this as root to see all")
    if lock.exists():
        advice = f"if libtpu says that the TPU is in use: sudo rm {lock}"
        return Finding(Level.INFO, "TPU chips", f"{found}, held by nobody; {lock} is a leftover", advice)
    return Finding(Level.OK, "TPU chips", f"{found}, held by nobody")


def _holders(paths: set[str]) -> tuple[list[str], int]:
    """The processes that have one of the files open, and how many could not be looked into."""
    holders, hidden = [], 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(path in paths for path in _open_files(process)):
                holders.append(f"pid {process.name} ({(process / 'comm').read_text().strip()})")
        except PermissionError:
            hidden += 1
        except OSError:
            continue  # it has ended
    return holders, hidden


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in os.listdir(process / "fd"):
        try:
            yield os.readlink(process / "fd" / descriptor)
        except FileNotFoundError:
            continue  # closed meanwhile


def check_credentials(environ: Mapping[str, str]) -> Finding:
    """Whether Google's libraries find credentials here. Of what they find only kind, account and project are shown."""
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
            warnings.simplefilter("ignore")  # that users should rather be service accounts
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
        return Finding(Level.WARNING, "credentials", found, f"mend or unset {_CREDENTIALS_VARIABLE}")
    advice = f"nothing to do unless TPUs are created or deleted from here, with Google's API; then: {_LOG_IN}"
    return Finding(Level.INFO, "credentials", found, advice)
