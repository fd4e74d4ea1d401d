"""Prompts in their order, epoch after epoch, read and tokenised here or in worker processes, with a place to return to.

`order` says which rows come when, `work` reads and tokenises a job's rows, `workers` does that in other processes,
`stream` hands the rows of one order out one by one, `feed` puts several streams together.
"""
