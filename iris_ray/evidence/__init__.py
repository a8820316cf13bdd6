"""The service ``evidence``: files about a task that has crashed or hung, kept in its output directory.

A service. May import: everything.
Start with `host.py`, which notices and keeps; `files.py` finds what there is on the host, and `core.py` judges names
and text. `client.py` reads it for a bug report.
"""
