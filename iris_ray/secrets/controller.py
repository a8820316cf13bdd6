"""The service of secrets in the Controller: it keeps the store, and refuses jobs whose secrets are not there."""

import logging

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening
from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.errors import InvalidMessageError
from iris_ray.model.checks import shown
from iris_ray.model.job_spec import JobSpec
from iris_ray.secrets.calls import SecretCalls, SecretStatus
from iris_ray.secrets.core import StoredSecret
from iris_ray.secrets.store import SecretStore

logger = logging.getLogger(__name__)


class SecretsInController(ControllerPart):
    """See `SecretCalls`. The store blocks, so each call of it runs in a thread."""

    calls = (SecretCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._store = SecretStore(controller.directory)

    async def admit(self, spec: JobSpec) -> None:
        """Refuse a job if one of its secrets is missing, or is for others. Raise like `SecretStore.value`."""
        for name in spec.stored_secrets:
            await self.in_thread(self._store.value, name, spec.user, spec.team)

    async def list_secrets(self) -> list[SecretStatus]:
        found = await self.in_thread(self._store.listed)
        users: dict[str, list[str]] = {}
        for job_id, job in self.controller.state.jobs.items():
            for name in job.spec.stored_secrets if job.over is None else ():
                users.setdefault(name, []).append(job_id)
        return [SecretStatus(secret, tuple(users.get(secret.name, ()))) for secret in found]

    async def set_secret(
        self, name: str, value: bytes, users: tuple[str, ...], teams: tuple[str, ...], user: str
    ) -> tuple[StoredSecret, StoredSecret | None]:
        self.controller.permissions.require_operator(user, "set secrets")
        found, before = await self.in_thread(self._store.put, name, value, users, teams, user)
        logger.info("the secret %s is now revision %d, set by %s", name, found.revision, user)
        return found, before

    async def remove_secret(self, name: str, user: str) -> None:
        self.controller.permissions.require_operator(user, "remove secrets")
        await self.in_thread(self._store.remove, name)
        logger.info("the secret %s was removed by %s", name, user)

    async def stored_secret(self, job_id: str, name: str, sender: PoolProcess) -> bytes:
        self.controller.require_pool(sender, job_id)
        job = self.controller.state.jobs.get(job_id)
        if job is None or name not in job.spec.stored_secrets:
            raise InvalidMessageError(f"{job_id} did not ask for the secret {shown(name)} when it was submitted")
        return await self.in_thread(self._store.value, name, job.spec.user, job.spec.team)
