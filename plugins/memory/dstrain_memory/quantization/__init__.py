"""Quantize the frozen weights of linear layers."""
