"""Gangs that make no progress, and which process holds them up.

A service. May import: everything.
"""
