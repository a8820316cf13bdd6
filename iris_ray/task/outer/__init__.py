"""Outer steps: slices that train by themselves average what they have learned, round by round.

May import: `task`, `actors.protocol`, `model`, `errors`. Needs NumPy and JAX. Start with `group.py`; `member.py` says
how all slices of a round get the same result, and `wire.py` carries it.
"""
