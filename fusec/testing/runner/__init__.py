"""Run the fuzzer: worker processes, coverage, shrinking, and the database of findings."""
