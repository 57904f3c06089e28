"""What a run will need, what `auto` chooses, and which settings do not go together.

`plan.read_command` prints the plan of a run: memory of a rank, time, traffic, price. It trains nothing.
`choices.resolve` puts a value in the place of every `auto` of a config, by what the machines of all ranks can do.
`rules.check` refuses settings that do not go together, with values that do. Only `startup` imports torch.
`dial.turn` sets what --depth gives, and `law.fit` says from small runs what a larger one will reach.
`startup` asks the machines at hand what they can do, refuses what they lack, and says in eight lines what is about to run.
"""
