"""Advantage estimators: by hand, by property, at the edges."""
