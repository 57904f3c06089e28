"""Ranks: how they connect, what they exchange, and how they stop.

`world.World` is the process group: rank, size, device, collectives and a coordinated stop.
`engine.Engine` is a model in training under any strategy, and all that the training loop sees.
`exact`, `from_scratch` and `sharded` are the strategies, with the interface of torch's DDP; `wrap.wrap` chooses one.
`shares` gathers tensors that are split across ranks.
`replicas` checks that all ranks hold the same bits.
"""
