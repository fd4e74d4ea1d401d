"""Installed plugins: found, chosen, loaded behind a boundary, validated, frozen, and built by name.

Discovery and registration happen once, before anything starts (`plugin_set.load_plugins`); the loops then call plain
typed objects.
"""
