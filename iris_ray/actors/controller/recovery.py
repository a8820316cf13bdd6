"""The start of a Controller: it restores the jobs from the records of the one before, and asks the pools for slices."""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator

from iris_ray.actors.controller.dispatcher import CALLS_IN_A_TURN, Dispatcher
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.node_table import NodeDiff, NodeTable
from iris_ray.actors.controller.pool_registry import PoolRegistry
from iris_ray.model.jobs import Gang, Job
from iris_ray.scheduler.planner import PlacedGang
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_all, apply_safely
from iris_ray.state.events import JobRestoredEvent, SliceHeldEvent, TimePassedEvent
from iris_ray.state.instructions import Instructions, ReclaimSlice
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)


async def come_back(
    state: ControllerState,
    journal: Journal,
    pools: PoolRegistry,
    nodes: NodeDiff,
    dispatcher: Dispatcher,
    read_nodes: Callable[[], NodeTable],
) -> None:
    """Read the hosts, and take over from an earlier Controller, if there was one.

    Raises:
        UnknownRecordError: another version of iris_ray wrote its records.
        DeposedError: another Controller has begun.
    """
    records, settings = journal.begin()
    table, views = await asyncio.gather(asyncio.to_thread(read_nodes), pools.come_back())
    held = (SliceHeldEvent(name, owner) for owner, view in views.items() for name in view.slices)
    apply_safely(state, [TimePassedEvent(journal.clock.now()), *held], Instructions())
    apply_safely(state, [*settings, *nodes.events_of(table)], Instructions())
    instructions = Instructions()
    for record in records:
        _restore(record, state, journal, instructions)
    for owner, view in views.items():
        await pools.process_is(owner, view.incarnation)
    pools.watch(views)
    await pools.end_unknown()
    journal.contained.end_noted(state, instructions)
    dispatcher.carry_out(instructions)
    apply_all(state, nodes.events_of(table))  # by now the state has the chips that iris_ray has reserved
    await journal.take_over(state)
    journal.contained.forget_notes()
    await repeat_orders(records, state, pools, dispatcher, instructions.reclaim)
    if records:
        logger.info("Controller %d takes up %d jobs of %d pools", journal.epoch, len(records), len(views))


def _restore(record: JobRecord, state: ControllerState, journal: Journal, instructions: Instructions) -> None:
    """Restore a job. If that fails, the state may be damaged, so have the next Controller leave this record out."""
    try:
        instructions.add(state.handle_event(JobRestoredEvent(record)))
    except Exception as error:
        journal.contained.note_unrestorable(record.job.spec.job_id, error)
        raise


async def repeat_orders(
    records: Iterable[JobRecord],
    state: ControllerState,
    pools: Container[str],
    dispatcher: Dispatcher,
    reclaim: list[ReclaimSlice],
) -> None:
    """Give the pools of all jobs their orders again, some at a time. Pools ignore orders that they have already."""
    job_ids = [record.job.spec.job_id for record in records]
    for number, (job, gang) in enumerate(_placed(job_ids, state, pools), 1):
        wanted = [one for one in reclaim if one.wanted in gang.groups]
        dispatcher.dispatch(dispatcher.order(job, gang), PlacedGang(job, gang, wanted))
        if number % CALLS_IN_A_TURN == 0:
            await asyncio.sleep(0)  # else all answers would be read late


def _placed(job_ids: Iterable[str], state: ControllerState, pools: Container[str]) -> Iterator[tuple[Job, Gang]]:
    """Yield the gangs of these jobs that have hosts at their turn: a pool that has just ended has ended its jobs."""
    for job in filter(None, map(state.jobs.get, job_ids)):
        for gang in job.gangs:
            if gang.placed and job.spec.owner in pools and not job.state.finished:
                yield job, gang
