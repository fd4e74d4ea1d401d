"""Single-line changes of the code, to find those that no test notices: `make mutants`."""
