"""Google's APIs of TPUs and KubeRay: asks why slices are lost or don't come, and requests missing slices.

May import: the pure core (`model`, `state`, `scheduler`).
Start with `provider.py` (what a provisioner and an API say to each other; its clients are `cloud_tpu.py` and
`compute_engine.py`), or with `demand.py` (which slices jobs miss) and `provisioning.py` (which slices to request and to
delete), which are pure. On KubeRay, `kuberay.py` is pure and `kubernetes.py` the client.
"""
