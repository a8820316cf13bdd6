"""Names of actors, placement groups and stored keys on which several processes agree."""

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
    """Return the key of a job's endpoint in the cluster's store; without a name, the prefix of all of them."""
    return f"endpoint/{job_id}:{name}"
