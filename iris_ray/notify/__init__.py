"""Tells people and programs what happens to jobs: by HTTP, in chats, by e-mail, or by a command on the head.

A service. May import: everything.
"""
