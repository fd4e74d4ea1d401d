"""Answers with the verdicts that people would give, one table for each reward, in the forms of public data sets."""
