"""What LoRA files of other programs contain and dstrain does not write."""
