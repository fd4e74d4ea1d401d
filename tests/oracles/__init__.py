"""slime's numbers against those of independent implementations: trl and verl, as published, in float64.

A package that is missing fails these tests; `make install` brings both.  What differs by definition is said beside
each test and, for users, in docs/algorithms.md.
"""
