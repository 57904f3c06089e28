"""Text to tokens, and tokens on disk.

`sources` and `hub` read documents from files and from Hugging Face, `tokenizer` and `encode` turn them into tokens, `writer`
writes these to files of a dataset, `join` puts them together from several machines, and `check` verifies them.
`tokens` opens a directory of tokens, ours or another program's, as one stream.
"""
