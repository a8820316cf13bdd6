"""Notices of Google's metadata server: preemption and maintenance, as the server of each host announces them.

A service. May import: everything.
Start with `watch.py`, which asks a host's server. `controller.py` asks on hosts that no pool holds any more.
"""
