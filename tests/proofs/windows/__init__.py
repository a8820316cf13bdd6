"""Small clusters whose faults fall into windows: between stop and confirmation, notice and leave, crash and return.

`rules.py` says what must hold, from what one can observe: `seen.py`, and of limits `limits.py`. `world.py` is one
cluster and what happens to it, `quiet.py` its end, when nothing goes wrong any more.
``python -m tests.proofs.windows --help`` runs many.
"""
