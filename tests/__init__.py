"""slime's tests.

A package, because distributions with a top-level `tests` of their own (verl is one) would otherwise be imported
instead.
"""
