"""What a run will need, what `auto` chooses, and which settings do not go together.

`plan.main` prints the plan of a run: memory of a rank, time, traffic, price. It trains nothing.
`choices.resolve` puts a value in the place of every `auto` of a config, by what the machine does. It is the same on all ranks.
`rules.check` refuses settings that do not go together, with values that do. `plan` and `rules` import no torch.
`dial.turn` sets what --depth gives, and `law.fit` says from small runs what a larger one will reach.
`choices.introduce` says in eight lines what is about to run.
"""
