"""What a run says: the console, metrics.jsonl, wandb and curves.

`log.Log` writes each line and each record once, by the master alone, and survives a full disk.
`curves` reads metrics.jsonl and draws it.
"""
