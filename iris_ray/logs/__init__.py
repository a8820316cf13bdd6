"""What tasks print: files on their hosts, the way to terminals, the archive, searches.

A service. May import: everything.
"""
