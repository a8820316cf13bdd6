"""Slots: models kept warm on devices, placed by memory, evicted for others. Everything of slots is in this room.

`core/` decides and is pure, `actors/` are the processes, `client/` is the public API, `front/` serves over HTTP, and
`cli.py` is ``iris-ray slots``. Start with `core/slot.py` and `core/fleet.py`. May import: everything.
"""
