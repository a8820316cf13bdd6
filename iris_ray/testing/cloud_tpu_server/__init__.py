"""An emulator of the Cloud TPU API v2, for tests: gRPC on loopback, with the types of the google-cloud-tpu package.

Tests drive it through the real client. Nothing happens by itself: `advance` takes every queued resource and node one
step further, and tests can set the state of each. It follows the documentation of the API:

- A queued resource goes ACCEPTED → (WAITING_FOR_RESOURCES →) PROVISIONING → ACTIVE, and its node READY with it.
- It holds quota in every state, also SUSPENDED and FAILED, until it is deleted and gone.
- Without ``force`` only a queued resource without nodes can be deleted, or one that is ACCEPTED, FAILED or SUSPENDED.
- A repeated request with the same request id gets the same operation and changes nothing.

Start with `server.py`, which has the API's methods; `zone.py` has the resources.
"""

from iris_ray.testing.cloud_tpu_server.server import CloudTpuServer

__all__ = ["CloudTpuServer"]
