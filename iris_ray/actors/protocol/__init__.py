"""What processes say to each other: messages, status, logs, files of tasks, the protocol's version; and what each actor
may be asked, as a Protocol that says what each method means.

An actor's class is its interface itself where all callers may import it: SliceActor, and the actors of slots.

May import: the pure core. Start with `messages.py` and `controller_interface.py`.
"""
