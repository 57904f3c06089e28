"""Shared by all folders: errors, command lines and files.

`errors` ends a command with one line that names the fix. `cli` turns flags into frozen dataclasses.
`files` limits the size of what it reads, and publishes what it writes by rename.
"""
