"""The checks of ``iris-ray doctor`` on a TPU VM: which processes hold its chips, and Google's credentials."""

import threading
import warnings
from collections.abc import Mapping

from iris_ray.actors.host.chips import Devices, blocks, find_holders
from iris_ray.cli.printing import Finding, Level, counted

CREDENTIALS_TIMEOUT_S = 3.0
_CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_LOG_IN = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's file"


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
