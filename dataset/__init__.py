"""From text to tokens, and tokens on disk.

`sources` reads documents from files and URLs. `tokenizer` and `encode` turn them into tokens, `writer` writes the tokens to a
dataset, `check` verifies it, and `card` describes it for the Hub. `tokens` opens a directory of tokens, ours or another
program's, as one stream per split.
"""
