"""How stages are carried out: plans, executors, rounds, progress."""
