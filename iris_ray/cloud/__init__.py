"""Google's Cloud TPU API: what it says about lost slices, and how missing slices are asked for.

May import: the pure core (`model`, `state`, `scheduler`).
Start with `cloud_tpu.py` (the client) and `provisioning.py` (what to ask for; pure).
"""
