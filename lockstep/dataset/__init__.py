"""From text to tokens, and tokens on disk.

`sources` reads documents from files and URLs. `tokenizer` and `encode` turn them into tokens, `writer` writes the tokens to a
dataset, and `check` verifies it. `tokens` opens a directory of tokens, ours or another
program's, as one stream per split.
"""
