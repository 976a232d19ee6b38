"""Units, inputs, tasks and the plan: what a pipeline declares, and what follows from
it.
"""
