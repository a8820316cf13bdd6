"""The protocol between processes: messages, status, files of tasks, versions. The interface of each actor is a Protocol
with its docstrings, unless all callers may import the actor's class: SliceActor, actors of slots.

May import: `processes`, the pure core. Start with `messages.py` and `controller_interface.py`.
"""
