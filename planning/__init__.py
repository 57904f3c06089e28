"""What a run will need, and what `auto` chooses.

`plan.main` prints the plan of a run: memory of a rank, time, traffic, price. It trains nothing.
`choices.resolve` puts a value in the place of every `auto` of a config, by what the machine does. It is the same on all ranks.
`choices.introduce` says in eight lines what is about to run.
"""
