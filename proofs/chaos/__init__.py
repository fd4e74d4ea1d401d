"""Chaos: a seeded schedule of many faults over one run, which must end as the run without them."""
