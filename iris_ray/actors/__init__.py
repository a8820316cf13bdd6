"""Everything that runs as Ray actors. Imports point downwards.

May import: the pure core and `cloud`. The layers, from the top: `pool` and `controller`,
`host`, `calls`, `protocol`. No other package but `slots` knows Ray actors.
Start with ARCHITECTURE.md, "A job from request to result".
"""
