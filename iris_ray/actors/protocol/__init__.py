"""What processes say to each other: messages, status, logs, names, the protocol's version. Frozen data.

May import: the pure core. Start with `messages.py`.
"""
