"""Slots on Ray: an actor for each slot, one for each runner, and the SlotManager around the pure reconciler.

May import: `actors.host`, `actors.calls`, `actors.protocol`, `slots.core`, `model`, `processes`, `errors`. Everything
here runs in the Ray job of the user who serves the models. Hosts come from the Controller, by jobs that the client
submits (`slots/client/hold_host.py`). Start with `slot_manager.py`; `slot_actor.py` is what runs a user's model.
"""
