"""The public API of slots: register models, have them answer, hold sessions, and give them hosts.

May import: `client`, `task`, `actors`, `slots.actors`, `slots.core`, `model`, `processes`, `errors`.
Start with `slot_client.py`.
"""
