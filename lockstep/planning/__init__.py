"""What a run will need, what `auto` chooses, and which settings conflict.

`plan` prints what a run will need, without training. `rules` rejects settings that conflict. `choices` resolves every `auto`.
`startup` checks
what the machines can do, and prints what is about to run. Only `startup` imports torch.
"""
