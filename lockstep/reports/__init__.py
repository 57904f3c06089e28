"""What a run reports: the console, metrics.jsonl, wandb and curves.

`log.Log` writes every line and record, on the master only, and survives a full disk. `progress` decides what to report.
`curves` reads metrics.jsonl and draws it. `compare` tabulates several runs. `trace` profiles updates.
"""
