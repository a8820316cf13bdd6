"""More slices: Ray's autoscaler, KubeRay, a provisioner, and the cloud's word about lost ones.

A service. May import: everything.
"""
