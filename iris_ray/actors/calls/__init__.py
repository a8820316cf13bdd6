"""How one process asks another: calls, liveness, the connection to the Controller, private Ray APIs.

May import: `actors.protocol` and the pure core.
Start with `asking.py`, which asks once, and `asking_again.py`. `controller_connection.py` and `controller_client.py`
ask until the Controller answers. Then `liveness.py`.
"""
