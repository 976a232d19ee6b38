"""Generate one image or video, or a dataset of them."""
