"""More slices: Ray's autoscaler, KubeRay, a provisioner, and what the cloud says of lost ones.

A service. May import: everything.
"""
