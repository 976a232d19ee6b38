"""Every option of a training run and of `dstrain generate`: its type, default, bounds, help and effects."""
