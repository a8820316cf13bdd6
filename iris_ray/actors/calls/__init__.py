"""What processes say to each other: messages, answers, names in Ray's tables, the protocol's version, private Ray APIs.

May import: the pure core.
Start with `messages.py` and `answers.py`.
"""
