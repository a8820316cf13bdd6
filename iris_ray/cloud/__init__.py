"""Google's Cloud TPU API: asks why slices are lost, and requests missing slices.

May import: the pure core (`model`, `state`, `scheduler`).
Start with `cloud_tpu.py` (the client), or with `demand.py` (which slices jobs miss) and `provisioning.py` (which slices
to request and to delete), which are pure.
"""
