"""Check results: models against other runtimes, planted faults, recorded answers, tests on several GPUs."""
