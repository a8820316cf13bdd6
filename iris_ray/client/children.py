"""Submits the jobs of tasks whose next attempts may adopt them (``children="adopt"``)."""

import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.names import NAMESPACE, detached_pool
from iris_ray.actors.protocol.messages import ChildOf, RunRequest
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.client.caller_pool import REPEATED, pool_of_this_process, submit_detached
from iris_ray.client.connection import require_cluster
from iris_ray.client.job_progress import say_if_it_runs_once
from iris_ray.model.checks import part_of_id
from iris_ray.model.constraints import Constraint
from iris_ray.model.options import ADOPT
from iris_ray.task.job_info import get_job_info


class Begun(NamedTuple):
    """A job that was submitted, or adopted.

    Attributes:
        job_id: its id; an adopted job keeps its own.
        results: the reference to its results.
        pool: the pool that runs it.
        is_new: whether it was submitted, and the Controller may still refuse it.
    """

    job_id: str
    results: "ray.ObjectRef[list[Any]]"
    pool: Actor[PoolInterface]
    is_new: bool


def children_outlive_attempts() -> bool:
    """Return whether this is a task whose next attempt may adopt the jobs that it submits."""
    me = get_job_info()
    return me is not None and me.children == ADOPT


_numbers: Counter[str] = Counter()
"""The number of children of each name that this process has submitted."""
_counting = threading.Lock()


def as_child(request: RunRequest, place: Sequence[Constraint] = (), one_of_a_name: bool = False) -> RunRequest:
    """Return the request as that of a job which the next attempt of this task may adopt, if its job asks for that.

    Args:
        request: the job. Jobs of a group end with the attempt, as their ids are new in each.
        place: constraints of the request that come from the place where this attempt runs.
        one_of_a_name: whether the task has at most one child of each name at a time.
    """
    me = get_job_info()
    if me is None or not children_outlive_attempts() or request.spec.group is not None:
        return request
    number: int | None = None
    if not one_of_a_name:
        with _counting:
            number = _numbers[request.spec.name]
            _numbers[request.spec.name] += 1
    return replace(request, child_of=ChildOf(me.job_id, me.task_index, me.attempt, tuple(place), number))


def begin(request: RunRequest, detached: bool = False) -> Begun:
    """Submit a job from a process that may not be connected yet, or adopt the job that the task's last attempt left."""
    require_cluster()
    if (adopted := adopt(request)) is not None:
        return adopted
    say_if_it_runs_once(request.spec)
    outlives = detached or request.child_of is not None
    results, pool = submit_detached(request) if outlives else pool_of_this_process.submit(request)
    return Begun(request.spec.job_id, results, pool, is_new=True)


def adopt(request: RunRequest) -> Begun | None:
    """Adopt the job that an earlier attempt of this task has submitted under the name and with the request.

    If there is none, but the attempt's job of the same name and number has another request, end that one. Return None
    if no job was adopted.
    """
    if request.child_of is None:
        return None
    others = []
    for pool in _pools_of(request.child_of.job_id, request.spec.name):
        job_id, differs = _ask(pool, request, replaces=False)
        if job_id is not None:
            return _adopted(job_id, pool)
        others += [pool] if differs else []
    for pool in others:
        job_id, differs = _ask(pool, request, replaces=True)
        if job_id is not None:
            return _adopted(job_id, pool)
        if differs:
            _say(f"{pool.name} of an earlier attempt was ended; it was another job: {'; '.join(differs)}")
            break
    return None


def _pools_of(parent: str, name: str) -> Iterator[Actor[PoolInterface]]:
    """Yield the pools of a job's children of a name, as far as they outlive its attempts."""
    wanted = re.compile(re.escape(detached_pool(f"{parent}/{part_of_id(name)}-")) + "[0-9a-f]+")
    named = (each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE)
    for found in sorted(filter(wanted.fullmatch, named)):
        try:
            yield Actor(ray.get_actor(found, NAMESPACE), found.removeprefix(detached_pool("")), REPEATED)
        except ValueError:  # it has just ended
            continue


def _ask(pool: Actor[PoolInterface], request: RunRequest, replaces: bool) -> tuple[str | None, tuple[str, ...]]:
    try:
        answer = ray.get(pool.call(PoolInterface.adopt, request, replaces))
    except RayError:  # it has just ended
        return None, ()
    return answer.job_id, answer.differs


def _adopted(job_id: str, pool: Actor[PoolInterface]) -> Begun:
    _say(f"job {job_id} continues: this attempt has adopted it")
    return Begun(job_id, pool.call(PoolInterface.results), pool, is_new=False)


def _say(what: str) -> None:
    print(f"iris_ray: {what}", file=sys.stderr)
