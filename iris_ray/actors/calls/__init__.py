"""How one process asks another: calls and missing answers, liveness, the way to the Controller, private Ray APIs.

May import: `actors.protocol` and the pure core.
Start with `asking.py` and `liveness.py`.
"""
