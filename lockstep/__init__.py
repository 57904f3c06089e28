"""The machinery that keeps a run the same, whatever trains in it.

The root of the repository has the experiment: the model, the order of the data, the training loop and the commands.
Everything here serves them. `settings` has every flag, and `command` starts and ends every script. Below them,
`common` and `hardware` know files, errors and machines, `dataset` turns text into tokens, `numerics` computes, `parallel`
connects ranks, `checkpoints` keeps the run, `planning` predicts what it needs, and `reports` says what it does.
"""
