"""Everything that runs as Ray actors. `pool` and `controller` are above `host`, and that above the three others.

May import: the pure core and `cloud`. No other package knows Ray actors.
Start with ARCHITECTURE.md, "One job's way".
"""
