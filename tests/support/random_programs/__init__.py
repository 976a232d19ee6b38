"""Random programs, and an evaluator that computes them without plans, caches or runs."""
