"""Google's APIs of TPUs: asks why slices are lost, and requests missing slices.

May import: the pure core (`model`, `state`, `scheduler`).
Start with `provider.py` (what a provisioner and an API say to each other; its clients are `cloud_tpu.py` and
`compute_engine.py`), or with `demand.py` (which slices jobs miss) and `provisioning.py` (which slices to request and to
delete), which are pure.
"""
