"""Runs on this machine: in local processes (the modes simple and validate), or on a simulated cluster with faults.

A service. May import: everything.
Start with `mode.py`, which reads ``mode=`` and ``IRIS_RAY_MODE``, and `run.py`, which runs a request here.
"""
