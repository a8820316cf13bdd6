"""Names of actors, placement groups and stored keys on which several processes agree."""

from collections.abc import Container

CONTROLLER_NAME = "controller"
NAMESPACE = "iris_ray"
PLACEMENT_GROUP_PREFIX = "iris_ray/"


def reservations_of(owner: str) -> str:
    """Return the prefix of the names of all placement groups of a pool."""
    return f"{PLACEMENT_GROUP_PREFIX}{owner}/"


def incarnations_of(owner: str) -> str:
    """Return the prefix of the keys, in the cluster's store, that number the processes of a pool."""
    return f"incarnation/{owner}/"


def endpoint_key(job_id: str, name: str) -> str:
    """Return the key of a job's endpoint in the cluster's store."""
    return f"endpoint/{job_id}:{name}"


def is_endpoint_of(jobs: Container[str], key: str) -> bool:
    """Return whether a key is that of an endpoint of one of these jobs. Ids and names may have colons."""
    parts = key.removeprefix("endpoint/").split(":")
    return any(":".join(parts[:count]) in jobs for count in range(1, len(parts)))
