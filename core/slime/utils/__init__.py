"""Import paths that users of the field know; the definitions live elsewhere."""
