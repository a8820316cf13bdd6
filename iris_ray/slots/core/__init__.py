"""Slots: models kept warm on devices, placed by memory, evicted for others. Only decides.

May import: `model`, `errors`. No Ray, no clock, no I/O: times and ids come in as arguments.
Start with `slot.py` and `fleet.py`; `allocator.py` decides where a slot goes and what is evicted for it.
"""
