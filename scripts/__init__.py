"""Programs that are no part of the packages."""
