"""Prompt files of every format, each read by the row and by the block."""
