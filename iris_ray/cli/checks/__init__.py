"""What ``iris-ray doctor`` checks: this machine, its chips and Google credentials, the cluster, and each TPU host.

May import: `cli`, `actors` and the pure core.
Start with `hosts.py`; a check returns findings (`cli/printing.py`). `host_look.py` travels to the hosts.
"""
