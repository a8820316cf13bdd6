"""What is asked about the hosts of an attempt that has ended."""

import asyncio

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.evidence import gather_evidence
from iris_ray.actors.wire.messages import AttemptOrder, HostPlace
from iris_ray.model.ids import AttemptId
from iris_ray.model.outcomes import HostEvidence
from tests.support.attempts import Controller, Slices


class SilentController(Controller):
    """Does not answer; notes that a question was given up."""

    given_up = False

    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up = True
            raise
        return {}


class SilentSlices(Slices):
    async def healthy(self, patience_s: float, timeout_s: float) -> dict[int, None]:
        await asyncio.Event().wait()
        return {}


def test_cancelled_gathering_gives_up_its_question_to_the_controller() -> None:
    async def is_given_up() -> bool:
        controller = SilentController()
        order = AttemptOrder(AttemptId("job", 1), ((HostPlace("node", "10.0.0.1", "a", 0),),), {"TPU": 4.0}, 1, 1)
        gathering = asyncio.ensure_future(
            gather_evidence(AttemptPlace(order), SilentSlices(), controller, {}, 5.0)  # type: ignore[arg-type]
        )
        await asyncio.sleep(0.01)
        gathering.cancel()
        await asyncio.wait({gathering})
        return controller.given_up

    assert asyncio.run(is_given_up())
