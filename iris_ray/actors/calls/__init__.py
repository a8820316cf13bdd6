"""How one asks an actor: once, or until it answers.

May import: the pure core, `actors.protocol` and `actors.wire`.
Start with `actor.py`. `actors/wire/controller_connection.py` and `actors/wire/controller_client.py` ask until the
Controller answers.
"""
