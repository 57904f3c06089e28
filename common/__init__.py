"""The ground: every command line, every foreign byte and every error.

`errors` ends a command in one line that names the fix. `cli` turns flags into frozen dataclasses.
`files` reads what others wrote up to a limited size, and publishes by rename.
"""
