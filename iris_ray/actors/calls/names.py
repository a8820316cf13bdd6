"""Names of actors, placement groups and stored keys on which several processes agree."""

from collections.abc import Container

from iris_ray.actors.calls.ray_internals import ClusterStore

CONTROLLER_NAME = "controller"
NAMESPACE = "iris_ray"
PLACEMENT_GROUP_PREFIX = "iris_ray/"
CODE_PREFIX, COMMAND_PREFIX = "code/", "command/"


def detached_pool(job_id: str) -> str:
    """Return the name of the pool of a detached job."""
    return f"pool/{job_id}"


def reservations_of(owner: str) -> str:
    """Return the prefix of the names of all placement groups of a pool."""
    return f"{PLACEMENT_GROUP_PREFIX}{owner}/"


def incarnations_of(owner: str) -> str:
    """Return the prefix of what a pool has in the cluster's store: the numbers of its processes, and its adopter."""
    return f"incarnation/{owner}/"


def adopter_key(owner: str) -> str:
    """Return the key, in the cluster's store, of the attempt that has adopted the only job of a pool."""
    return f"{incarnations_of(owner)}adopter"


def endpoint_key(job_id: str, name: str) -> str:
    """Return the key of a job's endpoint in the cluster's store."""
    return f"endpoint/{job_id}:{name}"


def code_key(job_id: str) -> str:
    """Return the key of the record of a job's code in the cluster's store."""
    return f"{CODE_PREFIX}{job_id}"


def command_key(job_id: str) -> str:
    """Return the key of the command line that has submitted a job, in the cluster's store."""
    return f"{COMMAND_PREFIX}{job_id}"


def is_endpoint_of(jobs: Container[str], key: str) -> bool:
    """Return whether a key belongs to an endpoint of one of these jobs. Ids and names may have colons."""
    parts = key.removeprefix("endpoint/").split(":")
    return any(":".join(parts[:count]) in jobs for count in range(1, len(parts)))


def take_incarnation(owner: str) -> int:
    """Take a number that is larger than that of any earlier process of a pool. Block until the GCS answers.

    So the Controller can tell which of two processes is newer. Clocks can't: Ray restarts a pool on any host.
    """
    store, prefix = ClusterStore(), incarnations_of(owner)
    names = (key.removeprefix(prefix) for key in store.keys(prefix))
    taken = [int(name) for name in names if name.isdecimal()]
    number = max(taken, default=0) + 1
    while not store.put_new(f"{prefix}{number}", b""):  # another process has just taken this number
        number += 1
    for earlier in taken:
        store.delete(f"{prefix}{earlier}")
    return number


def forget_incarnations(owner: str) -> None:
    """Forget the numbers of a pool that is gone for good, and which attempt has adopted its job."""
    ClusterStore().delete_all(incarnations_of(owner))
