"""Runs of other frameworks: their scripts and files are read, and written as run files of slime.

    shell, recipe  →  rules, work with the tables of docs/migrating.md  →  run_file

Nothing of a script is run: commands in it are read, not called.
"""
