"""What a run will need, what `auto` chooses, and which settings do not go together.

`plan` prints what a run will need, and trains nothing. `rules` refuses settings that do not go together. `choices` gives every
`auto` a value. `dial` sets what --depth gives, and `law` predicts the loss of a large run from small ones. `startup` asks the
machines at hand what they can do, and says what is about to run. Only `startup` imports torch.
"""
