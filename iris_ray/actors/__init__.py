"""Everything that runs as Ray actors. `wire` is below `host`, and both are below `pool` and `controller`.

May import: the pure core and `cloud`. No other package knows Ray actors.
Start with ARCHITECTURE.md, "One job's way".
"""
