"""Calls of Google's clients: time limits and retries, which these clients do not have, and errors in words."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from iris_ray.capacity.settings import LOCATION
from iris_ray.errors import InvalidRequestError, ProviderError
from iris_ray.model.checks import shown

CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
"""The scope of hosts: the roles of their service account alone limit what they may do."""
_ENDPOINT = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[::1\]):\d{1,5}")

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Patience:
    """The time limits of one try, and of all tries of a call together, in seconds."""

    try_s: float
    total_s: float


FOR_CHANGES = Patience(20.0, 60.0)


class GoogleApi:
    """One zone of one of Google's APIs.

    Args:
        name: of the API, for people.
        role: that its callers need.
        location: ``projects/<project>/locations/<zone>``.
        endpoint: HOST:PORT of an emulator on loopback; None means Google's API, with this machine's credentials.
        variable: the environment variable that names the emulator, for messages.

    Raises:
        InvalidRequestError: the location or endpoint is malformed.
    """

    def __init__(self, name: str, role: str, location: str, endpoint: str | None, variable: str) -> None:
        if not LOCATION.fullmatch(location):
            raise InvalidRequestError(f"{shown(location)} is not a place of TPUs; give projects/PROJECT/locations/ZONE")
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise InvalidRequestError(
                f"{variable} is {shown(endpoint)}; it names an emulator on this machine, such as 127.0.0.1:80"
            )
        self.location = location
        self.endpoint = endpoint
        self._name = name
        self._role = role

    def call(self, call: Callable[[float], Reply], patience: Patience, may_be_missing: bool = False) -> Reply | None:
        """Return the reply, or None if the resource is missing and may be.

        Args:
            call: makes the call within so many seconds. It may be repeated: it reads, or it has a request id.

        Raises:
            ProviderError: the API can't be reached, or refuses; its cause is Google's error.
        """
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError

        passing = (exceptions.ServiceUnavailable, exceptions.DeadlineExceeded, exceptions.InternalServerError)
        retrying = Retrying(
            retry=retry_if_exception_type(passing),
            wait=wait_random_exponential(multiplier=0.1, max=5.0),
            stop=stop_after_delay(patience.total_s - patience.try_s),
            reraise=True,
        )
        try:
            return retrying(call, patience.try_s)
        except exceptions.NotFound as error:
            if may_be_missing:
                return None
            raise ProviderError(self._in_words(error)) from error
        except (exceptions.GoogleAPIError, GoogleAuthError, OSError) as error:
            raise ProviderError(self._in_words(error)) from error

    def _in_words(self, error: Exception) -> str:
        from google.api_core.exceptions import ClientError, Forbidden

        what = "refuses" if isinstance(error, ClientError) else "can't be asked"
        first_line = (str(error).strip().splitlines() or ["no message"])[0][:300]
        lacks_role = (
            isinstance(error, Forbidden) and "quota" not in first_line.lower()
        )  # Compute Engine's, too, is a 403
        remedy = f"; {self._missing_role()}" if lacks_role else ""
        return f"{self._name} {what}: {type(error).__name__}: {first_line}{remedy}"

    def _missing_role(self) -> str:
        project = self.location.split("/")[1]
        return (
            f"does the service account of this machine have {self._role} in {project}? gcloud projects"
            f" add-iam-policy-binding {project} --member=serviceAccount:EMAIL --role={self._role}"
        )


def refusal(error: ProviderError) -> str:
    """Return the API's refusal as a sentence; raise the error if it is not a refusal."""
    from google.api_core.exceptions import ClientError

    if isinstance(error.__cause__, ClientError):
        return str(error)
    raise error
