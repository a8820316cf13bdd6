"""What ``iris-ray doctor`` checks: this machine, its chips and Google credentials, the cluster, and each TPU host.

May import: `cli.printing`, `actors` and the pure core.
Start with `findings.py`, which is what a check returns; `selftest` uses it, too. `host_look.py` travels to the hosts.
"""
