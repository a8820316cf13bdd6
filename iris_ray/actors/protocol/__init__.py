"""What each actor may be asked: its interface, as a Protocol with the meaning of each method.

The class of an actor is its interface itself where all callers may import it: SliceActor, and the actors of slots.

May import: the pure core and `actors.wire`.
Start with `controller_interface.py`.
"""
