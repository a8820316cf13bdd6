"""Calls of the service of secrets."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.secrets.core import StoredSecret

if TYPE_CHECKING:
    from iris_ray.actors.protocol.messages import PoolProcess


@dataclass(frozen=True, slots=True)
class SecretStatus:
    """A secret of the cluster's store, without its value.

    Attributes:
        secret: its metadata.
        jobs: the ids of the unfinished jobs that use it.
    """

    secret: StoredSecret
    jobs: tuple[str, ...]


@calls_of("secrets")
class SecretCalls(Protocol):
    """Calls of people, and of pools."""

    async def list_secrets(self) -> list[SecretStatus]:
        """Return the secrets of the cluster's store by name, without their values.

        Raises:
            SecretStoreError: the store can't be read.
        """

    async def set_secret(
        self, name: str, value: bytes, users: tuple[str, ...], teams: tuple[str, ...], user: str
    ) -> tuple[StoredSecret, StoredSecret | None]:
        """Set a secret of the store. Return it and the secret that it replaces, both without their values.

        Args:
            name: the name by which jobs request it.
            value: its text in UTF-8.
            users, teams: the users and teams whose jobs may use it; both empty: all jobs.
            user: the user who sets it.

        Raises:
            InvalidRequestError: the name or the value is invalid.
            SecretStoreError: it can't be written. The earlier secret stays.
            NotPermittedError: the user is not an operator.
        """

    async def remove_secret(self, name: str, user: str) -> None:
        """Remove a secret from the store. What runs keeps its value.

        Raises:
            SecretNotFoundError: there is none of that name.
            SecretStoreError: it can't be removed.
            NotPermittedError: the user is not an operator.
        """

    async def stored_secret(self, job_id: str, name: str, sender: "PoolProcess") -> bytes:
        """Return the value of a secret of the store, for an attempt of a job.

        Raises:
            InvalidMessageError: the job has not asked for it.
            SecretNotFoundError: it is not in the store any more.
            SecretStoreError: it can't be read.
            NotPermittedError: it is for other users, or the job is another pool's.
        """
