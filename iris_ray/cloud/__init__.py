"""Google's Cloud TPU API: what it says about lost slices, and how iris_ray asks for missing slices.

May import: the pure core (`model`, `state`, `scheduler`).
Start with `cloud_tpu.py` (the client), or with `demand.py` (what is missing) and `provisioning.py` (what to ask for),
which are pure.
"""
