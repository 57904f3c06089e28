"""What a run reports: the console, metrics.jsonl, wandb and curves.

`log.Log` writes each line and each record once, on the master only, and survives a full disk. `progress` decides what to
report. `curves` reads metrics.jsonl and draws it, and `compare` makes a table of several runs.
"""
