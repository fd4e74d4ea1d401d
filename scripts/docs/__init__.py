"""Builds the documentation as a site: `python -m scripts.docs`, which is `make docs`."""
