"""The service of secrets in a pool: each attempt gets the values that its secrets have in the store now."""

import asyncio
from dataclasses import replace

from iris_ray.actors.pool.services import PoolPart
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.model.secret import with_value
from iris_ray.secrets.calls import SecretCalls


class SecretsInPool(PoolPart):
    """Fetches the values of stored secrets."""

    async def prepared(self, request: RunRequest) -> RunRequest:
        """Return the request with the present values of its secrets. Raise like `SecretCalls.stored_secret`."""
        stored = {one.stored for one in request.secrets.values() if one.stored}
        controller, job_id = self.pool.controller, request.spec.job_id
        asking = (controller.ask(SecretCalls.stored_secret, job_id, name, controller.sender) for name in stored)
        # each in an answer of its own, as Ray puts large ones into its object store
        values = dict(zip(stored, await asyncio.gather(*asking), strict=True))
        found = {
            name: with_value(one, values[one.stored].decode()) if one.stored else one
            for name, one in request.secrets.items()
        }
        return replace(request, secrets=found)
