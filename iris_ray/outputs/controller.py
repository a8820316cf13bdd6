"""The service of output directories in the Controller: it knows the limit that operators have set."""

from iris_ray.actors.controller.services import ControllerPart
from iris_ray.outputs.calls import OutputCalls
from iris_ray.outputs.settings import GB, TASK_OUTPUT_GB


class OutputsInController(ControllerPart):
    """See `OutputCalls`."""

    calls = (OutputCalls,)

    async def most_bytes(self) -> int | None:
        gigabytes = self.controller.state.settings.value(TASK_OUTPUT_GB)
        return None if gigabytes is None else gigabytes * GB
