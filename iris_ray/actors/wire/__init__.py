"""What processes say to each other: messages, answers, names in Ray's tables, the protocol's version, private Ray APIs.

May import: the pure core, `actors.calls` and `actors.protocol`.
Start with `messages.py` and `answers.py`.
"""
