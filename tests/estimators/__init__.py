"""Advantage estimators: calculations by hand, properties, edge cases."""
