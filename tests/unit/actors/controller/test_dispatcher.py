"""Calls on pools that may be gone by the time of the call."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.wire.answers import Gone
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.messages import AttemptOrder, HostPlace
from iris_ray.model.ids import AttemptId
from iris_ray.scheduler.planner import Placement
from iris_ray.state.events import Event, TaskDispatchFailedEvent

ATTEMPT = AttemptId("job", 1)
ORDER = AttemptOrder(ATTEMPT, ((HostPlace("node", "10.0.0.1", "slice", 0),),), {"TPU": 4.0}, 1, "pool")


class LostPool:
    """A pool whose process has just ended."""

    async def assign(self, order: AttemptOrder) -> Gone:
        return Gone("the job's pool is gone (ActorDiedError)")


def test_pool_that_is_forgotten_before_its_order_is_sent_fails_the_dispatch() -> None:
    async def dispatched() -> tuple[list[Event], list[BaseException]]:
        errors: list[BaseException] = []
        applied: list[Event] = []
        pools = {"owner": LostPool()}
        background = BackgroundTasks(errors.append)

        def apply(events: Iterable[Event]) -> None:
            applied.extend(events)

        dispatcher = Dispatcher(
            SimpleNamespace(holds_capacity=lambda attempt: False),  # type: ignore[arg-type]
            SimpleNamespace(epoch=1),  # type: ignore[arg-type]
            pools,  # type: ignore[arg-type]
            SimpleNamespace(placed=lambda order: None),  # type: ignore[arg-type]
            apply,
            background,
        )
        job = SimpleNamespace(spec=SimpleNamespace(owner="owner"))
        dispatcher.dispatch(ORDER, Placement(job, SimpleNamespace(), []))  # type: ignore[arg-type]
        del pools["owner"]
        await background.all_ended()
        return applied, errors

    (failed,), errors = asyncio.run(dispatched())
    assert isinstance(failed, TaskDispatchFailedEvent)
    assert (failed.attempt, failed.error) == (ATTEMPT, "the job's pool is gone (ActorDiedError)")
    assert not errors
