"""State on disk: what is kept, found and written, and its public form.

A checkpoint is a Hugging Face model directory with the optimizer's state beside it. It is complete or not there.
`checkpoint.Checkpoints` saves while training goes on, from several ranks if need be. `retention` decides which ones stay: the
last intact one always does. `lookup` finds what a command starts from. `tensor_files` writes tensors in one file or several,
`huggingface` reads and writes the files that transformers knows.
"""
