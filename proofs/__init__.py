"""Proofs that need whole runs for minutes: faults, chaos, kill points, growth, mutants."""
