"""`dstrain generate`: one image or video, or a data set of them."""
