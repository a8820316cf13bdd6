"""What each host of an attempt is told to run. Pure."""

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.wire.messages import RunRequest, TaskLaunch
from iris_ray.model.ids import task_id
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import TaskKey
from iris_ray.model.workers import GPU


def launch_plan(request: RunRequest, place: AttemptPlace, ports: tuple[int, ...]) -> dict[str, list[TaskLaunch]]:
    """Return what to launch, by slice name and then host index.

    Args:
        request: the job.
        place: where the attempt runs.
        ports: three free ports of the first host, for this attempt alone: MEGASCALE, its debug port, the coordinator.
    """
    launches: dict[str, list[TaskLaunch]] = {name: [] for name in place.names}
    for key in place.tasks():
        launches[place.name(key)].append(_launch(request, place, key, ports))
    return launches


def _launch(request: RunRequest, place: AttemptPlace, key: TaskKey, ports: tuple[int, ...]) -> TaskLaunch:
    slices, spec = place.order.slices, request.spec
    host, index = place.host(key), place.task_index(key)
    megascale_port, debug_port, coordinator_port = ports
    address = slices[0][0].address
    num_tasks = place.num_tasks if spec.coscheduling else spec.replicas
    info = JobInfo(
        job_id=spec.job_id,
        task_id=task_id(spec.job_id, index),
        task_index=index,
        num_tasks=num_tasks,
        attempt=place.order.attempt.number,
        slice_id=key.slice_id,
        num_slices=len(slices),
        slice_name=host.slice_name if place.on_slices else "",
        worker_id=host.host_index,
        coordinator_address=f"{address}:{coordinator_port}" if num_tasks == place.num_tasks else "",
    )
    num_slices = len(slices) if place.on_slices else 1
    multislice = MultisliceInfo(address, key.slice_id, num_slices, megascale_port, debug_port)
    label = f"slice={key.slice_id} worker={key.host_index}" if place.on_slices else f"task={index}"
    return TaskLaunch(
        request.pickled_function,
        request.env,
        info,
        multislice,
        spec.resources.get("CPU"),
        f"{spec.name} {label}",
        spec.resources.get(GPU, 0.0),
    )
