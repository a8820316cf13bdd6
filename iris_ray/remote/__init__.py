"""Clusters of which only the dashboard's port is reachable.

A service. May import: everything. Start with `transport.py`, the transport of an `IrisClient`: `calls.py` has the head
call a function, in a job of Ray's job API (`ray_jobs.py`). One such function is the head's end of a tunnel
(`head_end.py`, `laptop_end.py`), through which commands of ``iris-ray`` run there (`cli.py`) and connections go.
"""
