"""slime's numbers against those of independent implementations: trl and verl, as published, in float64.

The tests fail if a package is missing; `make install` installs both. Differences of definition are listed beside
each test and, for users, in docs/algorithms.md.
"""
