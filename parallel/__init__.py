"""Ranks: how they connect, what they exchange, and how they stop.

`world.World` is the process group: rank, size, device, collectives, an agreed stop.
`engine.Engine` is a model in training, under any strategy. The training loop sees nothing behind it.
`exact`, `from_scratch` and `sharded` are the strategies; torch's DDP and FSDP2 have the same interface.
`shares` gathers tensors of which each rank holds a part.
`replicas` checks that all ranks hold the same bits.
"""
