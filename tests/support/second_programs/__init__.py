"""Random programs of a second generator, and an evaluator that computes them without plans,
stages or caches.
"""
