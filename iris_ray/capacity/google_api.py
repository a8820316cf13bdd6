"""Calls of Google's clients: time limits and retries, which these clients do not have, and errors in words."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

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
        location: ``projects/<project>/locations/<zone>``.
        endpoint: HOST:PORT of an emulator on loopback; None means Google's API, with this machine's credentials.

    Attributes:
        name: the name of the API, for people.
        role: the role that its callers need.
        variable: the environment variable by which a test names an emulator.

    Raises:
        InvalidRequestError: the location or endpoint is malformed.
    """

    name: ClassVar[str]
    role: ClassVar[str]
    variable: ClassVar[str]

    def __init__(self, location: str, endpoint: str | None = None) -> None:
        if not LOCATION.fullmatch(location):
            raise InvalidRequestError(f"{shown(location)} is not a place of TPUs; give projects/PROJECT/locations/ZONE")
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise InvalidRequestError(
                f"{self.variable} is {shown(endpoint)}; it names an emulator on this machine, such as 127.0.0.1:80"
            )
        self.location = location
        self.endpoint = endpoint

    @classmethod
    def at(cls, location: str) -> Self:
        """Return a zone of Google's, or of the emulator that a test names in this process's environment."""
        return cls(location, os.environ.get(cls.variable) or None)

    def call(self, call: Callable[[float], Reply], patience: Patience, may_be_missing: bool = False) -> Reply | None:
        """Return the reply, or None if the resource is missing and may be.

        Args:
            call: makes the call; it gets the seconds within which an answer has to come. It may be repeated, because
                it reads, or has a request id.

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
        remedy, project = "", self.location.split("/")[1]
        lacks_quota = "quota" in first_line.lower()  # Compute Engine reports that as a 403
        if isinstance(error, Forbidden) and not lacks_quota:
            remedy = (
                f"; does the service account of this machine have {self.role} in {project}? gcloud projects"
                f" add-iam-policy-binding {project} --member=serviceAccount:EMAIL --role={self.role}"
            )
        return f"{self.name} {what}: {type(error).__name__}: {first_line}{remedy}"


def refusal(error: ProviderError) -> str:
    """Return the API's refusal as a sentence; raise the error if it is not a refusal."""
    from google.api_core.exceptions import ClientError

    if isinstance(error.__cause__, ClientError):
        return str(error)
    raise error
