"""Processes of a distributed run: ranks, barriers, signals."""
