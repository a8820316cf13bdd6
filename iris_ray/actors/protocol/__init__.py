"""What travels between processes, and what each actor may be asked.

May import: the pure core and `actors.wire`.
Start with `controller_interface.py`.
"""
