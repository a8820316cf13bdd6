"""How one asks an actor: once, or until it answers.

May import: the pure core, `actors.protocol` and `actors.wire`.
Start with `actor.py`. `actors/calls/controller_connection.py` and `actors/calls/controller_client.py` ask until the
Controller answers.
"""
