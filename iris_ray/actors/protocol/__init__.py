"""What travels between processes: messages, status, logs, files of tasks, the protocol's version. The interface of each
actor is a Protocol with its docstrings, unless all callers may import the actor's class: SliceActor, actors of slots.

May import: `history`, `processes`, the pure core. Start with `messages.py` and `controller_interface.py`.
"""
