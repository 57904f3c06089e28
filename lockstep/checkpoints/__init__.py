"""Checkpoints: how to save them, find them, and share them with other programs.

A checkpoint is a Hugging Face model directory that also holds the optimizer state, and it is either complete or absent.
`checkpoint.Checkpoints` saves them during training, from several ranks if needed. `retention` decides which ones to keep,
always including the last intact one. `lookup` finds the one that a command starts from.
`tensor_files` stores tensors in one or more files, and `huggingface` reads and writes transformers' files.
"""
