"""Numbers for the processes of a pool, so that the Controller can tell which of two is the newer one.

Clocks of two hosts can't tell, and Ray starts a pool anew on any host. The cluster's store can: a number is taken once.
"""

from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.actors.wire.shared_names import incarnations_of


def take_incarnation(owner: str) -> int:
    """Return a number that is larger than those of all earlier processes of a pool. Blocks until the GCS answers."""
    store, prefix = ClusterStore(), incarnations_of(owner)
    taken = [int(key.removeprefix(prefix)) for key in store.keys(prefix)]
    number = max(taken, default=0) + 1
    while not store.put_new(f"{prefix}{number}", b""):  # another process begins at this moment
        number += 1
    for earlier in taken:
        store.delete(f"{prefix}{earlier}")
    return number


def forget_incarnations(owner: str) -> None:
    """Forget the numbers of a pool that is gone for good."""
    ClusterStore().delete_all(incarnations_of(owner))
