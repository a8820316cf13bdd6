"""The public API of slots: register models, have them answer, hold sessions, and give them hosts.

May import: `client`, `task`, `slots.actors`, `slots.core`, `actors.calls`, `actors.protocol`, `model`, `errors`.
Start with `slot_client.py`.
"""
