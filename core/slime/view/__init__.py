"""Reads run folders for people: an index of the samples, filters, alerts, and the page of `slime view`.

Needs nothing but the files of a run, and changes none of them.
"""
