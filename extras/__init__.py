"""What one may delete. Each extra is a file or a folder behind one flag or one command.

`ladder` finds the size for a text and a time, with `dial` and `law`. `tasks` scores a model with lm-eval (--tasks).
`mirror` copies checkpoints to a store (--mirror). `publishing` uploads models with their cards (--push).
`char_tokenizer`, `convert_nanogpt` and `to_gguf` convert other tools' files, and `datatrove_tokens` prepares on many machines.
"""
