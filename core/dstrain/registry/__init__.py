"""Families and extensions: entry points and hooks."""
