"""Captions for a folder of images and videos: `dstrain caption`."""
