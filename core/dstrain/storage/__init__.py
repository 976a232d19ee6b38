"""Atomic files, locks and checksums."""
