"""Everything that runs as Ray actors. Imports point downwards.

May import: the pure core, and the floor below it. The layers, from the top: `pool` and `controller`,
`host`, `calls`, `protocol`. Services may start actors of their own, such as the one that reads logs on a host.
Start with ARCHITECTURE.md, "A job from request to result".
"""
