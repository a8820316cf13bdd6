"""An emulator of the parts of the Compute Engine API v1 that make TPU slices, for tests: REST on loopback.

Tests drive it through the real client, google-cloud-compute. Nothing happens by itself: `advance` takes every group one
step further, and tests can take hosts away. It refuses requests that Google was seen to refuse, or whose refusal Google
documents:

- A group with a workload policy has to be in bulk mode, and names the policy by its URL; its size has to be that of the
  topology. Resize requests are refused for it. Flex-start needs a maximum run duration and a group without repairs.
- In bulk mode all VMs of a group are made or none. Without capacity the group waits with the error
ZONE_RESOURCE_POOL_EXHAUSTED, and with QUOTA_EXCEEDED if a quota is used up. - A reservation is used up by the chips of
all groups that it has given VMs to. - A repeated request with the same request id gets the same operation and changes
nothing.

Start with `server.py`, which has the API's methods; `zone.py` has the resources.
"""

from iris_ray.testing.compute_server.server import ComputeServer

__all__ = ["ComputeServer"]
