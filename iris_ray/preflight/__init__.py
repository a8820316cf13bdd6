"""Tests of suspected hosts before a gang starts on them.

A service. May import: everything.
"""
