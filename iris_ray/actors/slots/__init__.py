"""Slots on Ray: an actor for each slot, one for each runner, and the SlotManager around the pure reconciler.

May import: `slots`, `model`, `errors`. Everything here runs in the Ray job of whoever serves the models.
Start with `slot_manager.py`; `slot_actor.py` is what runs a user's model.
"""
