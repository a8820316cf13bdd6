"""Tries real TPU slices, and writes a report.

A service. May import: everything.
"""
