"""Ranks: how they meet, what they exchange, and how they stop.

`world.World` is the process group: rank, size, device, collectives, an agreed stop.
`engine.Engine` is a model as it is trained, by any strategy. The training loop knows nothing behind it.
`exact`, `from_scratch` and `sharded` are the strategies; torch's DDP and FSDP2 stand behind the same surface.
`replicas` tells whether all ranks hold the same bits.
"""
