"""Google's Cloud TPU API and KubeRay: asks why slices are lost or don't come, and requests missing slices.

May import: the pure core (`model`, `state`, `scheduler`).
Start with `cloud_tpu.py` (the client), or with `demand.py` (which slices jobs miss) and `provisioning.py` (which slices
to request and to delete), which are pure. On KubeRay, `kuberay.py` is pure and `kubernetes.py` the client.
"""
