"""Shared by all folders: errors, command lines and files.

`errors` ends a command with a one-line message that names the fix. `cli` turns flags into frozen dataclasses.
`files` limits the size of what it reads, and publishes what it writes with a rename.
`records` has the types of flags and JSON fields, and `steps` parses the flags that list steps.
"""
